"""Weights of the head in memory that the caller's code computes with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.held_blocks import HeldBlocks
from penstock.engine.spans import Span
from penstock.roles import Role
from tests.support.engines import inventory, make_plan_of, tiny_config, workload


@pytest.mark.parametrize("frozen", ["", "lm_head.*", "model.norm.*"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_every_tensor_of_a_held_block_has_memory_of_its_own(frozen: str, split: bool) -> None:
    """Of a split block, the trained tensors stay where the plan stores them."""
    model = inventory(tiny_config("llama"), [frozen] if frozen else [])
    plan = make_plan_of(model, workload(), "hhhhd" if split else "dddd")
    head, formats = len(model.blocks) - 1, plan.workload.formats(plan.placement.rounds)
    block, at = model.blocks[head], plan.placement.blocks[head]
    elements = block.flat_elements(True)
    data = torch.zeros(formats.nbytes(Role.WEIGHT, elements), dtype=torch.uint8)
    tiers: Any = SimpleNamespace(
        plan=plan,
        inventory=model,
        formats=formats,
        device=SimpleNamespace(empty=lambda nbytes, name: torch.zeros(nbytes, dtype=torch.uint8)),
        is_split=lambda block: at.is_split,
        span=lambda block, role: Span(role, data, 0, elements, formats),
    )
    assert at.is_split == (split and bool(frozen))

    parameters = HeldBlocks(tiers, frozenset({head})).parameters()

    assert parameters.keys() == {tensor.name for tensor in block.tensors}
    for number, parameter in enumerate(parameters.values(), start=1):
        parameter.data.fill_(number)
    for number, tensor in enumerate(block.tensors, start=1):
        parameter = parameters[tensor.name]
        assert parameter.shape == tensor.shape
        assert bool((parameter == number).all()), tensor.name
