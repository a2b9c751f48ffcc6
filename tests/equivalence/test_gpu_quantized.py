"""On a GPU, quantized weights have the values that a CPU computes, and plans give equal bits."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.model import quantize as quantizing
from penstock.model.quantize import dequantize, quantize
from penstock.packed_weights import PackedLayout, Quantization, scratch_nbytes
from tests.equivalence.runs import DISK, DRAM, RESIDENT
from tests.equivalence.test_adapters import IN_HBM, ON_DISK
from tests.equivalence.test_gpu_adapters import OPTIMIZER, SIZES, train
from tests.equivalence.test_quantized import use_quantized_values
from tests.support import engines
from tests.support.adapters import adapted, trained
from tests.support.torch_loop import TorchLoop

pytestmark = pytest.mark.gpu


def packed_on(device: str, weights: torch.Tensor, form: Quantization) -> torch.Tensor:
    packed = torch.empty(PackedLayout(weights.numel()).nbytes, dtype=torch.uint8, device=device)
    moved = weights.to(device)
    quantize(lambda low, high: moved[low:high], moved.numel(), form, packed)
    return packed


def values_of(packed: torch.Tensor, weights: torch.Tensor, form: Any, *, compiled: bool) -> Any:
    into = torch.empty(weights.numel(), dtype=weights.dtype, device=packed.device)
    nbytes = scratch_nbytes(weights.numel())
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=packed.device)
    dequantize(packed, form, into, scratch, compiled=compiled)
    return into.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["nf4", "int4"])
def test_every_way_to_compute_values_gives_the_bits_of_the_cpu(
    form: Quantization, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "CHUNK", 1 << 20)
    for elements in (1, 65, 4096 * 300, (1 << 21) + 16384 + 77):
        weights = torch.randn(elements).mul_(0.02).to(dtype)
        expected, found = (packed_on(device, weights, form) for device in ("cpu", "cuda"))
        assert torch.equal(found.cpu(), expected)
        values = values_of(expected, weights, form, compiled=False)
        for compiled in (False, True):
            assert torch.equal(values_of(found, weights, form, compiled=compiled), values)


@pytest.mark.parametrize(("quantize", "compiled"), [("nf4", True), ("int4", False)])
def test_plans_give_equal_bits(quantize: str, compiled: bool, tmp_path: Path) -> None:
    results = []
    for way in (RESIDENT, DRAM, DISK, IN_HBM, ON_DISK):
        model = adapted("llama", dtype=torch.bfloat16, **SIZES)
        work = {"dtype": "bf16", "compiled": compiled, "quantize": quantize}
        losses = train(model, way, tmp_path, 4, **work)
        results.append((losses, trained(model)))
    (first_losses, first), *others = results
    for losses, tensors in others:
        assert losses == first_losses
        assert all(torch.equal(tensors[name], first[name]) for name in first)


def test_20_steps_in_fp32_are_those_of_plain_torch_with_the_dequantized_weights(
    tmp_path: Path,
) -> None:
    model = adapted("llama", **SIZES)
    plain = copy.deepcopy(model)
    use_quantized_values(plain, "nf4")
    plain = plain.to("cuda")
    frozen = {name for name, p in plain.named_parameters() if not p.requires_grad}
    losses = train(model, IN_HBM, tmp_path, 20, dtype="fp32", quantize="nf4")
    loop = TorchLoop(plain, clip=0.5, settings=OPTIMIZER, micro_batch=2, frozen=frozen.__contains__)
    workload = engines.workload(batch=5, micro_batch=2)
    expected = [
        loop.step({name: tensor.to("cuda") for name, tensor in batch.items()})
        for batch in engines.batches(20, workload, model.config.vocab_size)
    ]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_memory_is_as_planned_with_a_rehearsal_and_a_self_check() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()  # by earlier tests, such as workspaces of cuBLAS
    model = adapted("llama", dtype=torch.bfloat16, **SIZES)
    with penstock.prepare(model, context=128, batch=4, device="cuda", quantize="nf4") as engine:
        for batch in engines.batches(2, engine.workload, model.config.vocab_size):
            engine.step(batch)
        hbm = engine.tiers()["hbm"]
        assert hbm["peak"] - left <= hbm["planned"], f"{hbm}; {left} bytes were there before"
