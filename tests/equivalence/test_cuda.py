"""On the GPU: every plan gives the same bits, and the sweep's side does not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.roles import STATE, Role
from tests import engines

pytestmark = pytest.mark.gpu

PLANS = {
    "resident": ("hhhh", {}),
    "dram": ("dddd", {}),
    "inputs on the device": ("dddh", {}),
    "split": (("hhhh", "dddd", "hhhh", "dddd", "dddd"), {}),
    "two rounds": ("dddd", {"rounds": 2}),
    "states on disk": ("dndd", {"piece": 8192}),
    "activations on disk": ("dddn", {}),
    "all on disk": ("nnnn", {"piece": 4096}),
    "all on disk, three rounds": ("nnnn", {"piece": 8192, "rounds": 3, "slots": 4, "ahead": 2}),
}


@pytest.fixture(autouse=True)
def _deterministic() -> object:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def train(family: str, name: str, disk: Path, moments: str = "fp32") -> list[torch.Tensor]:
    config = engines.tiny_config(family, hidden_size=64, head_dim=16)
    spots, how = PLANS[name]
    work = engines.workload(context=32, moments=moments)
    model = engines.inventory(config, freeze=["model.layers.1.mlp.down_proj.weight"])
    plan = engines.make_plan_of(model, work, spots, disk=disk, **how)
    engine = engines.make_engine(
        config, plan, model, engines.plain_model(config), device="cuda", optimizer={"lr": 1e-3}
    )
    rate = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    found = []
    for batch in engines.batches(20, work, config.vocab_size):
        found.append(engine.step(batch))
        found.append(torch.tensor(engine.grad_norm))
        rate.step()
    engine.finish()
    for block in model.blocks:
        for tensor in block.tensors:
            roles = (Role.WEIGHT, *STATE) if tensor.trainable else (Role.WEIGHT,)
            for role in roles:
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
def test_small_moments_too(moments: str, tmp_path: Path) -> None:
    wanted = train("llama", "resident", tmp_path, moments)
    for name in ("dram", "all on disk", "two rounds"):
        found = train("llama", name, tmp_path, moments)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), name
