"""Plans update moments in backward where steps get faster, and only where they can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.machine.machine import Machine
from penstock.machine.presets import preset
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.plan import Plan
from penstock.plan.schedule import Verb
from penstock.planner import QUICK, PlanResult, make_plan
from penstock.planner.plan_view import plan_json, summary
from penstock.records import from_json, to_json
from penstock.roles import MOMENTS, WEIGHTS, Role
from penstock.tiers import Tier
from penstock.units import GiB
from tests.support.models import llama, work

MODEL = llama("1b", 2048, 8192, 12, 2048, 512, 32000, False)
MACHINE = preset("h200")
DESKTOP = preset("desktop-24gb")
IN_ONE_PASS = replace(QUICK, late_moments=False)
DRIVE = (PathBudget(path="/mnt/nvme", nbytes=100 * GiB),)


def planned(
    *, batch: int = 4, hbm: float = 5, dram: float = 64, late: bool = True,
    machine: Machine = MACHINE, nvme: tuple[PathBudget, ...] = (), **changes: Any,
) -> PlanResult:  # fmt: skip
    budget = Budget(hbm=int(hbm * GiB), dram=int(dram * GiB), nvme=nvme)
    workload = work(MODEL, 2048, batch, **changes)
    return make_plan(MODEL, workload, budget, machine, effort=QUICK if late else IN_ONE_PASS)


def late_blocks(plan: Plan) -> list[int]:
    return [i for i, block in enumerate(plan.placement.blocks) if block.late_moments]


def test_a_step_that_waits_for_sweeps_updates_moments_in_backward() -> None:
    late, in_one_pass = planned(), planned(late=False)

    assert late_blocks(late.plan)
    assert not late_blocks(in_one_pass.plan)
    assert late.cost.step_seconds < 0.95 * in_one_pass.cost.step_seconds
    late.plan.check_model(MODEL)
    assert late.plan.peak(Tier.DRAM) <= 64 * GiB
    assert from_json(Plan, to_json(late.plan)) == late.plan


def test_every_block_is_swept_once_and_its_moments_once() -> None:
    result = planned()
    sweeps = [op for op in result.cost.schedule.operations if op.verb is Verb.SWEEP]

    for block in late_blocks(result.plan):
        found = [(op.roles, op.phase) for op in sweeps if op.block == block]
        assert found == [(WEIGHTS, "forward"), (MOMENTS, "backward")]


def test_a_step_that_computes_for_longer_than_it_sweeps_has_one_pass() -> None:
    assert not late_blocks(planned(batch=64, micro_batch=4).plan)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "lion"},
        {"optimizer": "adafactor"},
        {"hbm": 60},
        {"world": 2, "micro_batch": 2,
         "machine": replace(MACHINE, gpus=(MACHINE.gpus[0], replace(MACHINE.gpus[0], index=1)))},
        {"hbm": 6, "dram": 4, "nvme": DRIVE, "machine": DESKTOP, "optimizer": "lion"},
    ],
    ids=["another rule", "whole tensors", "all in HBM", "two ranks", "another rule, on a drive"],
)  # fmt: skip
def test_moments_are_updated_with_the_weights_where_they_cannot_be_late(
    options: dict[str, Any],
) -> None:
    result = planned(**options)

    assert not late_blocks(result.plan)
    result.plan.check_model(MODEL)


def test_late_moments_fit_into_dram_that_overlaid_activations_were_planned_for() -> None:
    """No activation is stored in the memory of a gradient that is in use until backward."""
    peak = planned(late=False).plan.peak(Tier.DRAM)

    result = planned(dram=peak / GiB)

    assert result.plan.peak(Tier.DRAM) <= peak
    assert result.cost.step_seconds <= planned(late=False, dram=peak / GiB).cost.step_seconds


def planned_on_nvme(
    *, dram: float = 4, late: bool = True, nvme: tuple[PathBudget, ...] = DRIVE, **options: Any
) -> PlanResult:
    return planned(
        hbm=6, dram=dram, batch=16, micro_batch=4, nvme=nvme, machine=DESKTOP, late=late, **options
    )


@pytest.mark.parametrize("dram", [3, 4])
def test_a_disk_that_is_idle_in_backward_gets_moments_to_update(dram: float) -> None:
    """With 3 GiB, activations that were in the memory of gradients move to the disk, too."""
    late, in_one_pass = planned_on_nvme(dram=dram), planned_on_nvme(dram=dram, late=False)
    blocks = late.plan.placement.blocks
    found = late_blocks(late.plan)

    assert found
    assert all(blocks[block].all_on(Role.FIRST, Tier.NVME) for block in found)
    assert late.cost.step_seconds < 0.9 * in_one_pass.cost.step_seconds
    late.plan.check_model(MODEL)
    assert late.plan.peak(Tier.DRAM) <= dram * GiB
    assert from_json(Plan, to_json(late.plan)) == late.plan


def test_only_activations_without_memory_move_to_the_disk() -> None:
    """The drive has 0.8 GiB for activations: enough if they are those of the first blocks.

    The gradients of the first blocks are in use until backward. Those of the others still have
    memory for the activations of later blocks.
    """
    drive = (PathBudget(path="/mnt/nvme", nbytes=7 * GiB),)
    late = planned_on_nvme(dram=3, nvme=drive)
    in_one_pass = planned_on_nvme(dram=3, nvme=drive, late=False)

    assert late_blocks(late.plan)
    assert late.cost.step_seconds < 0.9 * in_one_pass.cost.step_seconds
    assert late.plan.peak(Tier.DRAM) <= 3 * GiB
    assert late.plan.peak(Tier.NVME) <= drive[0].nbytes


def test_late_moments_on_nvme_are_written_as_often_as_others() -> None:
    """The drive wears no faster. With 4 GiB, nothing else moves to it."""
    late, in_one_pass = planned_on_nvme(), planned_on_nvme(late=False)

    assert late.disk_writes == in_one_pass.disk_writes
    assert late.cost.step_seconds < in_one_pass.cost.step_seconds


def test_each_piece_on_nvme_is_swept_and_written_in_two_parts() -> None:
    result = planned_on_nvme()
    operations = result.cost.schedule.operations

    for block in late_blocks(result.plan):
        own = [op for op in operations if op.block == block]
        swept = [(op.piece, op.roles, op.phase) for op in own if op.verb is Verb.SWEEP]
        pieces = range(len(swept) // 2)
        assert swept == [
            *((piece, WEIGHTS, "forward") for piece in pieces),
            *((piece, MOMENTS, "backward") for piece in pieces),
        ]
        written = [role for op in own if op.verb is Verb.WRITE for role in op.roles]
        assert written.count(Role.FIRST) == written.count(Role.MASTER) == len(pieces)
        read = [role for op in own if op.verb is Verb.READ for role in op.roles]
        assert read.count(Role.FIRST) == 2 * len(pieces)
        assert read.count(Role.MASTER) == len(pieces)


def test_a_disk_that_is_busy_all_the_time_updates_moments_once() -> None:
    """Little computation: moments that are read twice would make the step longer."""
    result = planned(hbm=6, dram=4, batch=1, nvme=DRIVE, machine=DESKTOP)

    assert not late_blocks(result.plan)


def test_plans_say_that_moments_are_updated_in_backward() -> None:
    result, without = planned(), planned(late=False)

    assert plan_json(result)["sweep"]["late_moments_blocks"] == len(late_blocks(result.plan))
    assert "the CPU updates their moments in backward" in summary(result, MACHINE)
    assert plan_json(without)["sweep"]["late_moments_blocks"] == 0
    assert "the CPU updates their moments in backward" not in summary(without, MACHINE)
