"""The order of a step keeps its promises for every placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from penstock.plan.build_schedule import evaluation_schedule, step_schedule, sweep_schedule
from penstock.plan.lifetimes import gradient_lifetimes, staging_lifetimes, weight_lifetimes
from penstock.plan.packing import pack, peak_nbytes
from penstock.plan.schedule import COMPUTE, Schedule, Verb
from penstock.plan.weight_window import PlacementIndex
from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import Role
from penstock.tiers import Tier
from tests.support.walker import Walker, all_on, cases, evaluator_for

Case = tuple[PlanEvaluator, Candidate]


def whole_passes(evaluator: PlanEvaluator, candidate: Candidate, walker: Walker) -> None:
    """Every round goes forth, turns, and goes back."""
    last = len(evaluator.inventory.blocks) - 1
    for round in range(candidate.rounds):
        done = [(verb, block) for verb, block, r in walker.computed if r == round]
        forth = [(Verb.FORWARD, i) for i in range(last)]
        back = [(Verb.BACKWARD, i) for i in range(last - 1, -1, -1)]
        assert done == [*forth, (Verb.LOSS, last), *back]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_step_computes_with_what_is_there_and_leaves_nothing(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    walker = Walker(evaluator.inventory, placement)

    walker.run(step_schedule(evaluator.inventory, placement))

    whole_passes(evaluator, candidate, walker)
    trained = {i for i, b in enumerate(placement.blocks) if b.sweep != "none"}
    assert {block for block, _ in walker.swept} == trained


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_step_with_nothing_pending_sweeps_and_writes_nothing(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    walker = Walker(evaluator.inventory, placement, pending=False)
    schedule = step_schedule(evaluator.inventory, placement, pending=False)

    walker.run(schedule)

    whole_passes(evaluator, candidate, walker)
    assert not {Verb.SWEEP, Verb.WRITE} & verbs(schedule)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_pass_that_adds_to_gradients_has_them_back_first(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    walker = Walker(evaluator.inventory, placement, pending=False, adds=True)

    walker.run(step_schedule(evaluator.inventory, placement, pending=False, adds=True))

    whole_passes(evaluator, candidate, walker)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_an_evaluation_goes_forward_once_and_moves_no_gradient(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    walker = Walker(evaluator.inventory, placement, pending=False)
    schedule = evaluation_schedule(evaluator.inventory, placement)

    walker.run(schedule)

    last = len(evaluator.inventory.blocks) - 1
    forth = [(Verb.FORWARD, i, 0) for i in range(last)]
    assert walker.computed == [*forth, (Verb.LOSS, last, 0)]
    assert verbs(schedule) <= {Verb.READ, Verb.RELEASE, Verb.FETCH, Verb.DROP, *COMPUTE}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_finishing_sweeps_everything_once_and_computes_nothing(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    walker = Walker(evaluator.inventory, placement)
    schedule = sweep_schedule(evaluator.inventory, placement)

    walker.run(schedule)

    wanted = [walker.sweeps_of(block) for block in range(len(evaluator.inventory.blocks))]
    assert walker.swept == set().union(*wanted)
    assert verbs(schedule) <= {Verb.READ, Verb.RELEASE, Verb.SWEEP, Verb.WRITE}
    assert len(walker.written) == len([op for op in schedule.operations if op.verb is Verb.WRITE])


def verbs(schedule: Schedule) -> set[Verb]:
    return {op.verb for op in schedule.operations}


@settings(max_examples=50, deadline=None)
@given(cases())
def test_no_more_is_in_flight_than_the_pools_hold(case: Case) -> None:
    """And no less: of the step, and of a pass that adds to gradients where there is one."""
    evaluator, candidate = case
    placement, formats = (
        evaluator.placement(candidate),
        evaluator.workload.formats(candidate.rounds),
    )
    schedules = [step_schedule(evaluator.inventory, placement)]
    if evaluator.workload.accumulate:
        schedules.append(step_schedule(evaluator.inventory, placement, pending=False, adds=True))
    promised = {pool.what: pool.nbytes for pool in evaluator.pools(candidate)}
    needed = {"weight slots": 0, "gradient buffers": 0, "NVMe staging": 0}

    for schedule in schedules:
        args = (evaluator.inventory, schedule, placement, formats)
        lists = (
            weight_lifetimes(schedule, placement),
            gradient_lifetimes(*args),
            staging_lifetimes(*args),
        )
        for what, lifetimes in zip(needed, lists, strict=True):
            assert promised.get(what, 0) >= peak_nbytes(lifetimes)
            needed[what] = max(needed[what], pack(lifetimes, refinements=0).nbytes)

    assert {what: promised.get(what, 0) for what in needed} == needed


@settings(max_examples=50, deadline=None)
@given(cases())
def test_streamed_layers_never_outnumber_their_slots(case: Case) -> None:
    evaluator, candidate = case
    facts = PlacementIndex.of(evaluator.inventory, evaluator.placement(candidate))
    inside: set[int] = set()
    for op in step_schedule(evaluator.inventory, evaluator.placement(candidate)).operations:
        if op.roles == (Role.WEIGHT,) and facts.is_layer(op.block):
            if op.verb is Verb.FETCH:
                inside.add(op.block)
            elif op.verb is Verb.DROP:
                inside.discard(op.block)
        assert len(inside) <= candidate.slots


def test_blocks_still_in_a_slot_are_not_fetched_again_at_the_turn() -> None:
    evaluator = evaluator_for(layers=6, tied=False)
    candidate = all_on(evaluator, Location.DRAM)
    schedule = step_schedule(
        evaluator.inventory, evaluator.placement(replace(candidate, slots=3, ahead=1))
    )

    again = [
        op.block
        for op in schedule.operations
        if op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,) and op.phase == "backward"
    ]

    assert again == [3, 2, 1]  # layers 4, 5 and 6 were in the three slots


def test_everything_in_hbm_moves_nothing() -> None:
    evaluator = evaluator_for(layers=3, tied=True)
    schedule = step_schedule(
        evaluator.inventory, evaluator.placement(all_on(evaluator, Location.HBM))
    )

    assert {op.verb for op in schedule.operations} == {*COMPUTE, Verb.SWEEP}
    assert all(op.gpu for op in schedule.operations if op.verb is Verb.SWEEP)


def test_a_gradient_that_rests_in_hbm_never_leaves_it() -> None:
    evaluator = evaluator_for(layers=3, tied=False)
    candidate = all_on(evaluator, Location.DRAM)
    locations = candidate.locations[1]._replace(
        weight=Location.HBM, state=Location.HBM, gradient=Location.HBM
    )
    schedule = step_schedule(
        evaluator.inventory, evaluator.placement(candidate.moved({1: locations}))
    )

    drained = {op.block for op in schedule.operations if op.roles == (Role.GRADIENT,)}

    assert drained == {0, 2, 3, 4}


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_each_round_streams_the_weights_once_more(rounds: int) -> None:
    evaluator = evaluator_for(layers=8, tied=False)
    candidate = replace(all_on(evaluator, Location.DRAM), rounds=rounds)
    schedule = step_schedule(evaluator.inventory, evaluator.placement(candidate))

    fetches = [
        op for op in schedule.operations if op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,)
    ]

    # Forth and back, less the two still in a slot at each turn; embedding and head once a round.
    turns = 2 * rounds - 1
    assert len(fetches) == 2 * 8 * rounds - 2 * turns + 2 * rounds


def test_bytes_on_a_tier_follow_the_spot() -> None:
    evaluator = evaluator_for(layers=2, tied=False)
    demand = evaluator.stored_nbytes(all_on(evaluator, Location.NVME))

    assert set(demand) == {Tier.NVME}
