"""Plans sweep blocks in DRAM between pieces from disk, unless that makes steps slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.machine.machine import Figure, Machine
from penstock.machine.presets import preset
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.plan import Plan
from penstock.planner import QUICK, PlanResult, make_plan
from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.sweep_order import interleave_sweeps
from penstock.records import from_json, to_json
from penstock.tiers import Tier
from penstock.units import GiB
from tests.support.models import llama, work
from tests.support.schedule_checker import all_on

MODEL = llama("wide", 4096, 14336, 8, 4096, 1024, 32000, False)
NVME = (PathBudget(path="/mnt/nvme", nbytes=100 * GiB),)
ON_DISK = (1, 3, 4, 6, 8)


def evaluator_with(*, sweep: float) -> PlanEvaluator:
    """Return an evaluator for a machine whose CPUs sweep at `sweep` times the preset's rate."""
    budget = Budget(hbm=40 * GiB, dram=64 * GiB, nvme=NVME)
    return PlanEvaluator(MODEL, work(MODEL, 2048, 4, moments="int8"), slower(sweep), budget)


def slower(factor: float) -> Machine:
    machine = preset("h200")
    node = machine.nodes[0]
    rates = tuple(
        replace(each, bytes_per_second=Figure.from_number(factor * each.bytes_per_second.median))
        if each.operation == "sweep"
        else each
        for each in node.rates
    )
    return replace(machine, nodes=(replace(node, rates=rates), *machine.nodes[1:]))


def mixed(evaluator: PlanEvaluator) -> Candidate:
    """Place states of some layers on NVMe and everything else in DRAM."""
    candidate = all_on(evaluator, Location.DRAM)
    return candidate.moved(
        {i: candidate.locations[i]._replace(state=Location.NVME) for i in ON_DISK}
    )


def step_seconds(*, sweep: float, interleaved: bool) -> float:
    evaluator = evaluator_with(sweep=sweep)
    return evaluator.cost(replace(mixed(evaluator), interleaved=interleaved)).step_seconds


def test_a_disk_does_not_wait_for_interleaved_sweeps() -> None:
    """The step is as long as the disk and backward take, also if CPUs sweep slowly."""
    evaluator = evaluator_with(sweep=1.0)
    cost = evaluator.cost(replace(mixed(evaluator), interleaved=True))
    disk = cost.busy["disk@/mnt/nvme"] * cost.step_seconds

    assert cost.phases["forward"] < 1.04 * disk

    slow = {each: step_seconds(sweep=0.3, interleaved=each) for each in (False, True)}
    fast = {each: step_seconds(sweep=1.0, interleaved=each) for each in (False, True)}

    assert fast[True] < fast[False]
    assert slow[True] - fast[True] < 0.4 * (slow[False] - fast[False])


def test_interleaved_sweeps_need_the_same_bytes() -> None:
    evaluator = evaluator_with(sweep=1.0)
    candidate = mixed(evaluator)

    chosen = interleave_sweeps(evaluator, candidate, exact=True)

    assert chosen == replace(candidate, interleaved=True)
    assert evaluator.pools(chosen) == evaluator.pools(candidate)
    assert evaluator.total_nbytes(chosen) == evaluator.total_nbytes(candidate)


def test_sweeps_are_in_the_order_of_blocks_if_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluator = evaluator_with(sweep=1.0)
    candidate = mixed(evaluator)
    seconds = {False: 1.0, True: 1.1}
    monkeypatch.setattr(PlanEvaluator, "exact_score", lambda _, each: seconds[each.interleaved])

    assert interleave_sweeps(evaluator, candidate, exact=True) == candidate


def planned(dram: int) -> PlanResult:
    budget = Budget(hbm=12 * GiB, dram=dram * GiB, nvme=NVME)
    return make_plan(MODEL, work(MODEL, 2048, 4), budget, preset("h200"), effort=QUICK)


def test_only_plans_with_states_on_disk_interleave_sweeps() -> None:
    with_disk, without = planned(12).plan, planned(64).plan

    assert with_disk.at_rest(Tier.NVME) > 0
    assert with_disk.placement.sweeps_interleaved
    assert without.at_rest(Tier.NVME) == 0
    assert not without.placement.sweeps_interleaved
    assert from_json(Plan, to_json(with_disk)) == with_disk


def test_a_plan_of_an_earlier_version_is_not_interleaved() -> None:
    plan = planned(12).plan
    stored = to_json(plan)
    del stored["placement"]["sweeps_interleaved"]

    assert from_json(Plan, stored) == replace(
        plan, placement=replace(plan.placement, sweeps_interleaved=False)
    )
