"""On a GPU, layers that are recomputed without unneeded products give the bits of all products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.model import unneeded_outputs
from penstock.model.meta_model import weight_dtype
from tests.equivalence.runs import state_of
from tests.equivalence.test_cuda import PLANS
from tests.support import engines

pytestmark = pytest.mark.gpu

COMPILED = {"compiled": True, "loss_kernel": "fused", "attention": "varlen"}
WIDE = {"hidden_size": 256, "intermediate_size": 688, "initializer_range": 0.1}


def train(
    how: dict[str, Any], name: str, disk: Path, *, skips: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = engines.tiny_config("llama", **WIDE)
    work = engines.workload(context=96, **how)
    model = engines.inventory(config)
    assert all(layer.unneeded_elements for layer in model.layers)
    if not skips:
        blocks = tuple(replace(block, unneeded=()) for block in model.blocks)
        model = replace(model, blocks=blocks)
    spots, plan = PLANS[name]
    made = engines.make_plan_of(model, work, spots, disk=disk, **plan)
    plain = engines.plain_model(config, weight_dtype(work.dtype))
    optimizer = {"lr": 1e-3}
    with engines.make_engine(
        config, made, model, plain, device="cuda", optimizer=optimizer
    ) as engine:
        batches = engines.batches(3, work, config.vocab_size)
        losses = [float(engine.step(batch)) for batch in batches]
        return losses, state_of(engine)


@pytest.mark.parametrize(
    "how",
    [{}, COMPILED, COMPILED | {"mlp_tile": 64}, COMPILED | {"dtype": "fp32"}],
    ids=["eager", "compiled", "compiled, in tiles", "compiled, fp32"],
)
def test_skipped_products_change_no_bit(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = list[int]()

    def blank(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if unneeded_outputs._current.skips:
            skipped.append(x.numel())
        return x.new_full((*x.shape[:-1], weight.shape[0]), float("nan"))

    monkeypatch.setattr(unneeded_outputs, "_output_like", blank)
    losses, state = train(how, "resident", tmp_path, skips=False)
    assert not skipped

    for name in ("dram", "all on disk"):
        found, other = train(how, name, tmp_path, skips=True)
        assert found == losses, name
        assert all(torch.equal(other[key], state[key]) for key in state), name
    assert skipped
