"""The ring of hidden states never gives one slot to two things that are needed together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.device import CpuDevice
from penstock.engine.hidden_states import EXTRA_SLOTS, HiddenStates
from penstock.planner.candidate import Location
from tests.support.schedule_checker import all_on, evaluator_for


def ring(micro_batches: int) -> HiddenStates:
    evaluator = evaluator_for(2, tied=False, batch=micro_batches)
    placement = evaluator.placement(all_on(evaluator, Location.DRAM))
    tiers: Any = SimpleNamespace(
        plan=SimpleNamespace(workload=evaluator.workload, placement=placement),
        inventory=evaluator.inventory,
        formats=evaluator.workload.formats(placement.rounds),
        device=CpuDevice(),
        on_device=lambda block, role: False,
    )
    return HiddenStates(tiers)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_gradients_and_returning_activations_are_in_different_slots(micro_batches: int) -> None:
    for blocks in range(1, 8):  # the head's input begins at another slot each time
        hidden = ring(micro_batches)
        hidden.start_round()
        for block in range(blocks):
            for micro in range(micro_batches):
                hidden.next_slot(block, micro)
        hidden.start_backward(micro_batches)

        gradients = [hidden.gradient_slot(micro) for micro in range(micro_batches)]
        assert gradients == [hidden.slot_of(blocks - 1, micro) for micro in range(micro_batches)]
        for count in range(5):
            coming = [hidden.activation_slot(count + n) for n in range(EXTRA_SLOTS)]
            assert sorted(gradients + coming) == list(range(hidden.slots))


def test_a_slot_is_used_again_after_all_others() -> None:
    hidden = ring(2)
    hidden.start_round()
    inputs = [(block, micro) for block in range(4) for micro in range(2)]

    found = [hidden.next_slot(*each) for each in inputs]

    assert [slot for slot, _ in found] == [n % hidden.slots for n in range(len(inputs))]
    assert [replaced for _, replaced in found] == [None] * hidden.slots + inputs[: -hidden.slots]
