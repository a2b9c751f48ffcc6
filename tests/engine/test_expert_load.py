"""The load of experts is relative to the mean of their layer."""

from __future__ import annotations

import torch

from penstock.engine.expert_load import ExpertLoad


def test_a_model_without_experts_has_no_load() -> None:
    assert ExpertLoad.of({}) is None


def test_the_busiest_and_the_idlest_expert_of_any_layer_are_found() -> None:
    rows = {1: torch.tensor([2, 2, 2, 2]), 3: torch.tensor([0, 6, 0, 6, 3, 3])}

    assert ExpertLoad.of(rows) == ExpertLoad(largest=2.0, smallest=0.0, idle=2)


def test_layers_that_computed_nothing_have_no_load() -> None:
    assert ExpertLoad.of({1: torch.tensor([0, 0])}) == ExpertLoad(0.0, 0.0, 2)
