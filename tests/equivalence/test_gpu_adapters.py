"""On a GPU, adapters are trained as PEFT trains them, and every plan gives the same bits."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.equivalence.runs import DISK, DRAM, RESIDENT, Way
from tests.equivalence.test_adapters import IN_HBM, ON_DISK, make_plan
from tests.support import engines
from tests.support.adapters import adapted, lora, trained
from tests.support.torch_loop import TorchLoop

pytestmark = pytest.mark.gpu

OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
SIZES = {"hidden_size": 64, "head_dim": 16}
LAYERS = {r"layers\.1\..*": 7}


def train(model: Any, way: Way, disk: Path, steps: int, **work: Any) -> list[float]:
    plan, workload = make_plan(model, way, disk, **work)
    batches = engines.batches(steps, workload, model.config.vocab_size)
    with penstock.prepare(
        model, plan=plan, optimizer=OPTIMIZER, device="cuda", dtype=work["dtype"], rehearse=False
    ) as engine:
        return [float(engine.step(batch)) for batch in batches]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_plans_give_equal_bits(family: str, compiled: bool, tmp_path: Path) -> None:
    results = []
    config = lora(rank_pattern=LAYERS, alpha_pattern=LAYERS, lora_dropout=0.1)
    for way in (RESIDENT, DRAM, DISK, IN_HBM, ON_DISK):
        model = adapted(family, config, dtype=torch.bfloat16, **SIZES)
        losses = train(model, way, tmp_path, 4, dtype="bf16", compiled=compiled)
        results.append((losses, trained(model)))
    (first_losses, first), *others = results
    for losses, tensors in others:
        assert losses == first_losses
        assert all(torch.equal(tensors[name], first[name]) for name in first)


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match.*gate_up_proj")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_plans_give_equal_bits_with_adapters_of_experts(compiled: bool, tmp_path: Path) -> None:
    results = []
    for way in (RESIDENT, DRAM, IN_HBM, ON_DISK):
        model = adapted("olmoe", lora(), dtype=torch.bfloat16, **SIZES)
        losses = train(model, way, tmp_path, 3, dtype="bf16", compiled=compiled)
        results.append((losses, trained(model)))
    (first_losses, first), *others = results
    assert any(".experts." in name for name in first)
    for losses, tensors in others:
        assert losses == first_losses
        assert all(torch.equal(tensors[name], first[name]) for name in first)


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match.*gate_up_proj")
@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_20_steps_in_fp32_are_those_of_peft_in_plain_torch(family: str, tmp_path: Path) -> None:
    model = adapted(family, **SIZES)
    plain = copy.deepcopy(model).to("cuda")
    frozen = {name for name, p in plain.named_parameters() if not p.requires_grad}
    losses = train(model, IN_HBM, tmp_path, 20, dtype="fp32")
    loop = TorchLoop(plain, clip=0.5, settings=OPTIMIZER, micro_batch=2, frozen=frozen.__contains__)
    workload = engines.workload(batch=5, micro_batch=2)
    expected = [
        loop.step({name: tensor.to("cuda") for name, tensor in batch.items()})
        for batch in engines.batches(20, workload, model.config.vocab_size)
    ]
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, tensor in trained(plain).items():
        size = float(tensor.abs().max())
        found = trained(model)[name]
        torch.testing.assert_close(found, tensor.cpu(), rtol=1e-4, atol=1e-4 * size, msg=name)


def test_memory_is_as_planned(tmp_path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()  # by earlier tests, such as workspaces of cuBLAS
    model = adapted("llama", dtype=torch.bfloat16, **SIZES)
    with penstock.prepare(model, context=128, batch=4, device="cuda") as engine:
        for batch in engines.batches(2, engine.workload, model.config.vocab_size):
            engine.step(batch)
        hbm = engine.tiers()["hbm"]
        assert hbm["peak"] - left <= hbm["planned"], f"{hbm}; {left} bytes were there before"
