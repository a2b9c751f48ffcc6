"""On a GPU, every plan gives the same bits, whether the CPU or the GPU sweeps."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.loss import fused_loss
from penstock.model.meta_model import weight_dtype
from penstock.roles import STATE, Role
from tests.support import engines

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

PLANS = {
    "resident": ("hhhh", {}),
    "dram": ("dddd", {}),
    "inputs on the device": ("dddh", {}),
    "split": (("hhhh", "dddd", "hhhh", "dddd", "dddd"), {}),
    "two rounds": ("dddd", {"rounds": 2}),
    "states on disk": ("dndd", {"piece": 8192}),
    "activations on disk": ("dddn", {}),
    "all on disk": ("nnnn", {"piece": 4096}),
    "resident, all kept": ("hhhh", {"kept": (3, 3, 3)}),
    "streamed, some kept": ("dddd", {"kept": (1, 0, 3)}),
    "on disk, two rounds, some kept": ("nnnn", {"piece": 8192, "rounds": 2, "kept": (0, 2, 1)}),
    "swept on the GPU": ("dddd", {"gpu_swept": range(5), "gpu_piece": 4096}),
    "some swept on the GPU": (
        ("dddd", "dddd", "hhhh", "nnnn", "dddd"),
        {"gpu_swept": (0, 4), "gpu_piece": 8192, "piece": 8192, "kept": (0, 2, 0)},
    ),
    "moments updated in backward": ("dddd", {"late": True}),
    "some moments updated in backward": (
        ("dddd", "hhhh", "dddh", "dddd", "dddd"),
        {"late": True, "gpu_swept": (3,), "gpu_piece": 8192, "kept": (0, 2, 0)},
    ),
    "all on disk, three rounds": ("nnnn", {"piece": 8192, "rounds": 3, "slots": 4, "ahead": 2}),
}


def train(
    family: str, name: str, disk: Path, *, packed: bool = False, **changes: Any
) -> list[torch.Tensor]:
    config = engines.tiny_config(family, hidden_size=64, head_dim=16)
    spots, how = PLANS[name]
    work = engines.workload(context=32, **changes)
    model = engines.inventory(config, freeze=["model.layers.1.mlp.down_proj.weight"])
    plan = engines.make_plan_of(model, work, spots, disk=disk, **how)
    plain = engines.plain_model(config, weight_dtype(work.dtype))
    engine = engines.make_engine(config, plan, model, plain, device="cuda", optimizer={"lr": 1e-3})
    rate = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    found = []
    for number, batch in enumerate(engines.batches(20, work, config.vocab_size)):
        if packed:  # documents of 3, 4, 5 ... tokens
            row = torch.arange(work.context) % (3 + number)
            batch["position_ids"] = row.expand_as(batch["input_ids"]).clone()
        found.append(engine.step(batch))
        found.append(torch.tensor(engine.grad_norm))
        rate.step()
    engine.finish()
    trained = (Role.WEIGHT, *filter(engine.access.formats.has, STATE))
    for block in model.blocks:
        for tensor in block.tensors:
            for role in trained if tensor.trainable else (Role.WEIGHT,):
                found.append(torch.cat([p.clone() for p in engine.access.parts(tensor.name, role)]))
    engine.close()
    return found


@pytest.mark.parametrize("family", engines.FAMILIES)
def test_every_plan_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    wanted = train(family, "resident", tmp_path)
    for name in PLANS:
        found = train(family, name, tmp_path)
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_compressed_moments_give_the_same_bits_under_every_plan(
    moments: str, tmp_path: Path
) -> None:
    wanted = train("llama", "resident", tmp_path, moments=moments)
    for name in (
        *("dram", "all on disk", "two rounds", "swept on the GPU", "some swept on the GPU"),
        "moments updated in backward",
    ):
        found = train("llama", name, tmp_path, moments=moments)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


@pytest.mark.parametrize(
    "how",
    [{}, {"compiled": True, "loss_kernel": "fused", "attention": "varlen"}],
    ids=["eager", "compiled"],
)
def test_fp32_gives_the_same_bits_under_every_plan(how: dict[str, Any], tmp_path: Path) -> None:
    wanted = train("llama", "resident", tmp_path, dtype="fp32", **how)
    for name in (
        *("dram", "split", "all on disk", "two rounds", "streamed, some kept"),
        *("swept on the GPU", "some moments updated in backward"),
    ):
        found = train("llama", name, tmp_path, dtype="fp32", **how)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_compiled_layers_give_the_same_bits_under_every_plan(tmp_path: Path) -> None:
    how = {"compiled": True, "loss_kernel": "fused"}
    wanted = train("llama", "resident", tmp_path, **how)
    kept = ("resident, all kept", "streamed, some kept", "on disk, two rounds, some kept")
    swept = ("swept on the GPU", "some swept on the GPU")
    for name in ("dram", "split", "all on disk", "two rounds", *kept, *swept):
        found = train("llama", name, tmp_path, **how)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


def test_the_smoothed_fused_loss_gives_the_same_bits_under_every_plan(tmp_path: Path) -> None:
    how = {"compiled": True, "loss_kernel": "fused", "label_smoothing": 0.1}
    wanted = train("llama", "resident", tmp_path, **how)
    for name in ("dram", "all on disk", "two rounds"):
        found = train("llama", name, tmp_path, **how)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name


@pytest.mark.parametrize("compiled", [False, True])
def test_noise_on_embeddings_gives_the_same_bits_under_every_plan(
    compiled: bool, tmp_path: Path
) -> None:
    how = {"compiled": compiled, "neftune_noise_alpha": 5.0}
    wanted = train("llama", "resident", tmp_path, **how)
    for name in ("dram", "all on disk", "two rounds"):
        found = train("llama", name, tmp_path, **how)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
    without = train("llama", "resident", tmp_path, compiled=compiled)
    assert float(without[0]) != float(wanted[0])


def digest(name: str, disk: Path, **how: Any) -> str:
    """Return a hash of every bit of a run's result."""
    sums = hashlib.sha256()
    for tensor in train("llama", name, disk, **how):
        sums.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sums.hexdigest()


@pytest.mark.parametrize("compiled", [False, True])
def test_another_process_gives_the_same_bits(compiled: bool, tmp_path: Path) -> None:
    how: dict[str, Any] = {"compiled": compiled}
    how |= {"loss_kernel": "fused"} if compiled else {}
    program = (
        "import pathlib, sys\n"
        "from tests.equivalence.test_cuda import digest\n"
        f"print(digest('split', pathlib.Path(sys.argv[1]), **{how!r}))\n"
    )
    line = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    there = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)

    assert there.returncode == 0, there.stderr[-2000:]
    assert there.stdout.split()[-1] == digest("dram", tmp_path, **how)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tiles_of_packed_rows_give_the_same_bits_under_every_plan(
    family: str, compiled: bool, tmp_path: Path
) -> None:
    how = {"compiled": compiled, "attention": "varlen", "mlp_tile": 40, "packed": True}
    wanted = train(family, "resident", tmp_path, **how)
    for name in ("dram", "split", "all on disk", "two rounds"):
        found = train(family, name, tmp_path, **how)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
    apart = train(family, "resident", tmp_path, mlp_tile=40, packed=True)
    assert float(wanted[0]) == pytest.approx(float(apart[0]), rel=2e-3)
    assert float(wanted[1]) == pytest.approx(float(apart[1]), rel=2e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_another_layer_or_slot_does_not_recompile(packed: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how = {"compiled": True, "loss_kernel": "fused", "mlp_tile": 40, "packed": packed}
    train("llama", "dram", tmp_path, attention="varlen", **how)
    # With and without gradients, and both again for the layer with a frozen tensor.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("vocabulary", [7, 1000, 8192, 151936])
def test_the_fused_loss_equals_torchs(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(64, vocabulary, device="cuda")).to(torch.bfloat16)
    targets = torch.randint(0, vocabulary, (64,), device="cuda")
    targets[::5] = -100
    plain = logits.float().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(plain, targets, reduction="sum")
    (wanted * 0.25).backward()
    assert torch.allclose(fused_loss(logits.clone(), targets, None).float(), wanted, rtol=1e-5)
    found = fused_loss(logits, targets, 0.25)
    assert torch.allclose(found.float(), wanted, rtol=1e-5)
    assert plain.grad is not None
    assert torch.allclose(logits.float(), plain.grad, rtol=1e-2, atol=1e-6)
    assert not logits[targets == -100].any()
