"""On a GPU, every optimizer gives the same bits under every plan, with its memory as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.model.meta_model import weight_dtype
from tests.equivalence.runs import differing, state_of
from tests.equivalence.test_cuda import PLANS
from tests.equivalence.test_optimizers import CASES
from tests.support import engines

pytestmark = pytest.mark.gpu


def train(case: str, name: str, disk: Path, **changes: Any) -> dict[str, torch.Tensor]:
    work, options = CASES[case]
    config = engines.tiny_config("llama", hidden_size=64, head_dim=16)
    spots, how = PLANS[name]
    workload = engines.workload(context=32, **work, **changes)
    model = engines.inventory(config, freeze=["model.layers.1.mlp.down_proj.weight"])
    plan = engines.make_plan_of(model, workload, spots, disk=disk, **how)
    plain = engines.plain_model(config, weight_dtype(workload.dtype))
    with engines.make_engine(
        config, plan, model, plain, device="cuda", optimizer=options
    ) as engine:
        losses = [engine.step(batch) for batch in engines.batches(6, workload, config.vocab_size)]
        found = state_of(engine)
    return found | {"losses": torch.stack(losses)}


@pytest.mark.parametrize("case", CASES)
def test_every_plan_gives_the_same_bits(case: str, tmp_path: Path) -> None:
    """Muon multiplies matrices and Adafactor sums on the GPU, wherever the states are stored."""
    wanted = train(case, "resident", tmp_path)
    for name in ("dram", "split", "two rounds", "states on disk", "all on disk"):
        assert differing(wanted, train(case, name, tmp_path)) == [], name


@pytest.mark.parametrize("case", ["sgd with momentum", "lion", "muon"])
def test_bf16_moments_give_the_same_bits(case: str, tmp_path: Path) -> None:
    wanted = train(case, "resident", tmp_path, moments="bf16")
    for name in ("dram", "all on disk"):
        assert differing(wanted, train(case, name, tmp_path, moments="bf16")) == [], name


@pytest.mark.parametrize("case", ["muon", "adafactor"])
def test_losses_are_close_to_those_of_the_cpu(case: str, tmp_path: Path) -> None:
    work, options = CASES[case]
    found = {}
    for device in ("cpu", "cuda"):
        config = engines.tiny_config("llama", hidden_size=64, head_dim=16)
        workload = engines.workload(context=32, dtype="fp32", **work)
        model = engines.inventory(config)
        plan = engines.make_plan_of(model, workload, "dddd")
        plain = engines.plain_model(config, torch.float32)
        with engines.make_engine(
            config, plan, model, plain, device=device, optimizer=options
        ) as engine:
            batches = engines.batches(6, workload, config.vocab_size)
            found[device] = [float(engine.step(batch)) for batch in batches]

    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-3)
