"""Schedules are correct for every placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.buffers import STATES, states_nbytes
from penstock.plan.build_schedule import evaluation_schedule, step_schedule, sweep_schedule
from penstock.plan.lifetimes import (
    BufferKind,
    gradient_lifetimes,
    staging_lifetimes,
    state_lifetimes,
    weight_lifetimes,
)
from penstock.plan.packing import pack, peak_nbytes
from penstock.plan.placement_index import PlacementIndex
from penstock.plan.schedule import COMPUTE, Operation, Schedule, Verb
from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.roles import EXTENT, Role
from penstock.tiers import Tier
from penstock.units import round_up
from tests.support.schedule_checker import ScheduleChecker, all_on, cases, evaluator_for

Case = tuple[PlanEvaluator, Candidate]


def assert_complete_passes(
    evaluator: PlanEvaluator, candidate: Candidate, checker: ScheduleChecker
) -> None:
    """Assert that every round runs forward, the head, and backward through all blocks."""
    last = len(evaluator.inventory.blocks) - 1
    for round in range(candidate.rounds):
        done = [(verb, block) for verb, block, r in checker.computed if r == round]
        forth = [(Verb.FORWARD, i) for i in range(last)]
        back = [(Verb.BACKWARD, i) for i in range(last - 1, -1, -1)]
        assert done == [*forth, (Verb.LOSS, last), *back]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_step_computes_with_what_is_in_hbm_and_leaves_nothing(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    checker = ScheduleChecker(evaluator.inventory, placement)

    checker.run(step_schedule(evaluator.inventory, placement))

    assert_complete_passes(evaluator, candidate, checker)
    trained = {i for i, b in enumerate(placement.blocks) if b.sweep != "none"}
    assert {block for block, _ in checker.swept} == trained


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_step_without_pending_sweeps_sweeps_and_writes_nothing(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    checker = ScheduleChecker(evaluator.inventory, placement, pending=False)
    schedule = step_schedule(evaluator.inventory, placement, pending=False)

    checker.run(schedule)

    assert_complete_passes(evaluator, candidate, checker)
    assert not {Verb.SWEEP, Verb.WRITE} & verbs(schedule)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_pass_that_adds_to_gradients_fetches_them_first(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    checker = ScheduleChecker(evaluator.inventory, placement, pending=False, adds=True)

    checker.run(step_schedule(evaluator.inventory, placement, pending=False, adds=True))

    assert_complete_passes(evaluator, candidate, checker)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_an_evaluation_runs_forward_once_and_moves_no_gradient(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    checker = ScheduleChecker(evaluator.inventory, placement, pending=False)
    schedule = evaluation_schedule(evaluator.inventory, placement)

    checker.run(schedule)

    last = len(evaluator.inventory.blocks) - 1
    forth = [(Verb.FORWARD, i, 0) for i in range(last)]
    assert checker.computed == [*forth, (Verb.LOSS, last, 0)]
    moves = {Verb.READ, Verb.RELEASE, Verb.FETCH, Verb.DROP, Verb.GATHER, Verb.MEET}
    assert verbs(schedule) <= {*moves, *COMPUTE}
    assert {op.phase for op in schedule.operations} == {"forward"}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_sweep_schedule_sweeps_everything_once_and_computes_nothing(case: Case) -> None:
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    checker = ScheduleChecker(evaluator.inventory, placement)
    schedule = sweep_schedule(evaluator.inventory, placement)

    checker.run(schedule)

    wanted = [checker.sweeps_of(block) for block in range(len(evaluator.inventory.blocks))]
    assert checker.swept == set().union(*wanted)
    others = {op.verb for op in schedule.operations if not op.gpu}
    assert others <= {Verb.READ, Verb.RELEASE, Verb.SWEEP, Verb.WRITE, Verb.GATHER}
    written = [op for op in schedule.operations if op.verb in (Verb.WRITE, Verb.OFFLOAD)]
    assert len(checker.written) == len(written)


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_a_step_is_correct_in_every_order_that_its_lanes_may_take(
    case: Case, random: Random
) -> None:
    """What an operation needs is on its own lane or in `after`, not just earlier in the list."""
    evaluator, candidate = case
    placement = evaluator.placement(candidate)
    schedule = step_schedule(evaluator.inventory, placement)
    checker = ScheduleChecker(evaluator.inventory, placement)

    checker.run_operations(any_order(schedule, random))

    assert_complete_passes(evaluator, candidate, checker)


def any_order(schedule: Schedule, random: Random) -> list[Operation]:
    """Return the operations in a random order that the schedule allows."""
    operations = schedule.operations
    needs = [set(op.after) for op in operations]
    for at, op in enumerate(operations):
        # Sweeps on the CPU may end in any order. The bytes of a buffer are one more lane: one copy
        # of a role is dropped before the next is fetched, whoever owns the bytes.
        for lane in ({op.lane} - {"", "sweep"}) | set(buffers(op)):
            before = [
                i for i in range(at) if lane in ({operations[i].lane} | set(buffers(operations[i])))
            ]
            needs[at] |= set(before[-1:])
    order: list[int] = []
    left = set(range(len(operations)))
    while left:
        ready = sorted(at for at in left if not needs[at] & left)
        order.append(random.choice(ready))
        left.remove(order[-1])
    return [operations[at] for at in order]


def buffers(op: Operation) -> list[str]:
    """Name the buffer that an operation begins or ends."""
    if op.verb in (Verb.FETCH, Verb.DROP) and not op.gpu:
        return [f"{op.block} {op.roles}"]
    if op.verb in (Verb.READ, Verb.RELEASE):
        return [f"{op.block} {op.piece} {op.roles}"]
    return []


def verbs(schedule: Schedule) -> set[Verb]:
    return {op.verb for op in schedule.operations}


@settings(max_examples=50, deadline=None)
@given(cases())
def test_pools_are_exactly_as_large_as_the_schedules_need(case: Case) -> None:
    """The schedules are the step and, with accumulation, a pass that adds to gradients."""
    evaluator, candidate = case
    placement, formats = (
        evaluator.placement(candidate),
        evaluator.workload.formats(candidate.rounds),
    )
    schedules = [step_schedule(evaluator.inventory, placement)]
    if evaluator.workload.accumulate:
        schedules.append(step_schedule(evaluator.inventory, placement, pending=False, adds=True))
    pools = {pool.what: pool.nbytes for pool in evaluator.pools(candidate)}
    needed = {"weight slots": 0, "gradient buffers": 0, "NVMe staging": 0, STATES: 0}

    for schedule in schedules:
        args = (evaluator.inventory, schedule, placement, formats)
        lists = (
            weight_lifetimes(schedule, placement),
            gradient_lifetimes(*args),
            staging_lifetimes(*args),
            state_lifetimes(*args),
        )
        for what, lifetimes in zip(needed, lists, strict=True):
            assert pools.get(what, 0) >= peak_nbytes(lifetimes)
            needed[what] = max(needed[what], pack(lifetimes, refinements=0).nbytes)

    needed[STATES] = states_nbytes(needed[STATES], on_gpu=True)
    assert {what: pools.get(what, 0) for what in needed} == needed


@settings(max_examples=50, deadline=None)
@given(cases())
def test_streamed_layers_never_exceed_the_number_of_slots(case: Case) -> None:
    evaluator, candidate = case
    index = PlacementIndex.of(evaluator.inventory, evaluator.placement(candidate))
    inside: set[int] = set()
    for op in step_schedule(evaluator.inventory, evaluator.placement(candidate)).operations:
        if op.roles == (Role.WEIGHT,) and index.is_layer(op.block):
            if op.verb is Verb.FETCH:
                inside.add(op.block)
            elif op.verb is Verb.DROP:
                inside.discard(op.block)
        assert len(inside) <= candidate.slots


def test_backward_does_not_fetch_layers_that_are_still_in_a_slot() -> None:
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

    assert again == [3, 2, 1]  # layers 4, 5 and 6 were still in the three slots


def test_backward_has_one_block_ahead_and_one_gradient_behind_in_hbm() -> None:
    evaluator = evaluator_for(layers=6, tied=False)
    placement = evaluator.placement(all_on(evaluator, Location.DRAM))
    schedule = step_schedule(evaluator.inventory, placement)
    operations = [(op.verb, op.block, op.roles) for op in schedule.operations]
    for layer in range(2, 5):
        computed = operations.index((Verb.BACKWARD, layer, ()))
        fetched = operations.index((Verb.FETCH, layer - 1, (Role.ACTIVATION,)))
        dropped = operations.index((Verb.DROP, layer + 2, (Role.GRADIENT,)))
        following = operations.index((Verb.BACKWARD, layer + 1, ()))
        assert following < fetched < computed
        assert following < dropped < computed
    assert schedule.operations[-1].phase == "backward"


@pytest.mark.parametrize(
    ("linear", "tied", "fetches"), [(True, False, 1), (True, True, 1), (False, False, 2),
                                    (False, True, 1)],
)  # fmt: skip
def test_an_embedding_is_fetched_again_only_if_its_backward_needs_it(
    linear: bool, tied: bool, fetches: int
) -> None:
    """A tied embedding is in HBM for the head, and stays there until its own backward."""
    evaluator = evaluator_for(4, tied, linear=linear)
    placement = evaluator.placement(all_on(evaluator, Location.DRAM))
    schedule = step_schedule(evaluator.inventory, placement)
    weights = [(op.verb, op.block) for op in schedule.operations if op.roles == (Role.WEIGHT,)]
    assert weights.count((Verb.FETCH, 0)) == fetches

    operations = [(op.verb, op.block, op.roles) for op in schedule.operations]
    head = operations.index((Verb.LOSS, 5, ()))
    between = (Verb.DROP, 0, (Role.WEIGHT,)) in operations[:head]
    assert between == (not tied)  # a large table takes no memory while layers compute


def test_a_frozen_embedding_is_not_fetched_for_its_backward() -> None:
    evaluator = evaluator_for(4, False, linear=False, frozen=15)
    placement = evaluator.placement(all_on_frozen(evaluator))
    schedule = step_schedule(evaluator.inventory, placement)
    weights = [(op.verb, op.block) for op in schedule.operations if op.roles == (Role.WEIGHT,)]
    assert weights.count((Verb.FETCH, 0)) == 1


def all_on_frozen(evaluator: PlanEvaluator) -> Candidate:
    """Place a model without trained tensors in DRAM."""
    candidate = all_on(evaluator, Location.DRAM)
    locations = tuple(at._replace(state=None, gradient=None) for at in candidate.locations)
    return replace(candidate, locations=locations)


def test_weights_that_the_gpu_swept_are_fetched_from_host_memory_after_they_are_back() -> None:
    evaluator = evaluator_for(3, tied=False, gpu_piece=1 << 16)
    blocks = range(len(evaluator.inventory.blocks))
    candidate = replace(all_on(evaluator, Location.DRAM), gpu_swept=frozenset(blocks))
    operations = step_schedule(evaluator.inventory, evaluator.placement(candidate)).operations

    for block in blocks:
        own = [at for at, op in enumerate(operations) if op.block == block]
        back = {at for at in own if operations[at].lane == "drain states"}
        fetch = next(operations[at] for at in own if operations[at].lane == "fetch")
        assert len(back) > 1
        assert back <= set(fetch.after)


def states_on_disk_of(evaluator: PlanEvaluator, layers: Sequence[int]) -> Candidate:
    """Place everything in DRAM but the states of some layers."""
    candidate = all_on(evaluator, Location.DRAM)
    on_disk = {i: candidate.locations[i]._replace(state=Location.NVME) for i in layers}
    return candidate.moved(on_disk)


def test_interleaved_sweeps_of_blocks_in_dram_are_spread_over_the_pieces_before_them() -> None:
    evaluator = evaluator_for(5, tied=False, piece=1 << 16)
    candidate = replace(states_on_disk_of(evaluator, (1, 4)), interleaved=True)
    operations = step_schedule(evaluator.inventory, evaluator.placement(candidate)).operations
    sweeps = [op.block for op in operations if op.lane == "sweep"]
    pieces = sweeps.count(1)
    assert pieces == sweeps.count(4) > 5

    first, last = sweeps.index(1), len(sweeps) - sweeps[::-1].index(1)
    # Layers 2 and 3 have as many pieces each, so two of them are swept before each piece.
    assert sweeps[first - 2 : last] == [2, 2, 1] * (pieces // 2) + [3, 3, 1] * (pieces // 2)
    # What follows layer 4, up to the head, is swept before its last piece.
    assert sweeps[-1] == 4
    for block in (2, 3, 5):
        own = {at for at, op in enumerate(operations) if op.lane == "sweep" and op.block == block}
        fetch = next(op for op in operations if op.lane == "fetch" and op.block == block)
        assert own == set(fetch.after), "weights are fetched when all pieces are swept"


def test_sweeps_that_are_not_interleaved_are_in_the_order_of_blocks() -> None:
    evaluator = evaluator_for(5, tied=False, piece=1 << 16)
    placement = evaluator.placement(states_on_disk_of(evaluator, (1, 4)))
    operations = step_schedule(evaluator.inventory, placement).operations

    sweeps = [op for op in operations if op.lane == "sweep"]

    assert [op.block for op in sweeps] == sorted(op.block for op in sweeps)
    assert {op.block for op in sweeps if op.piece is None} == {0, 2, 3, 5, 6}


def test_everything_in_hbm_moves_nothing() -> None:
    evaluator = evaluator_for(layers=3, tied=True)
    schedule = step_schedule(
        evaluator.inventory, evaluator.placement(all_on(evaluator, Location.HBM))
    )

    assert {op.verb for op in schedule.operations} == {*COMPUTE, Verb.SWEEP}
    assert all(op.gpu for op in schedule.operations if op.verb is Verb.SWEEP)


def test_a_gradient_stored_in_hbm_is_not_offloaded() -> None:
    evaluator = evaluator_for(layers=3, tied=False)
    candidate = all_on(evaluator, Location.DRAM)
    locations = candidate.locations[1]._replace(
        weight=Location.HBM, state=Location.HBM, gradient=Location.HBM
    )
    schedule = step_schedule(
        evaluator.inventory, evaluator.placement(candidate.moved({1: locations}))
    )

    offloaded = {op.block for op in schedule.operations if op.roles == (Role.GRADIENT,)}

    assert offloaded == {0, 2, 3, 4}


def test_a_sum_of_gradients_has_four_bytes_for_each_element() -> None:
    evaluator = evaluator_for(layers=3, tied=False)
    placement = evaluator.placement(all_on(evaluator, Location.DRAM))
    schedule = step_schedule(evaluator.inventory, placement)
    formats = evaluator.workload.formats(1)
    found = gradient_lifetimes(evaluator.inventory, schedule, placement, formats)
    sums = {
        each.key.block: each.nbytes for each in found if each.key.kind is BufferKind.GRADIENT_SUM
    }
    elements = [block.parameters(True) for block in evaluator.inventory.blocks]
    assert sums == {n: round_up(4 * count, EXTENT) for n, count in enumerate(elements)}
    assert max(elements) > EXTENT, "rounding would hide a wrong size"


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_each_round_streams_the_weights_again(rounds: int) -> None:
    evaluator = evaluator_for(layers=8, tied=False)
    candidate = replace(all_on(evaluator, Location.DRAM), rounds=rounds)
    schedule = step_schedule(evaluator.inventory, evaluator.placement(candidate))

    fetches = [
        op for op in schedule.operations if op.verb is Verb.FETCH and op.roles == (Role.WEIGHT,)
    ]

    # Forward and backward, without the two layers that are still in a slot when the direction
    # changes; the embedding and the head once per round.
    turns = 2 * rounds - 1
    assert len(fetches) == 2 * 8 * rounds - 2 * turns + 2 * rounds


def test_a_location_determines_the_tier() -> None:
    evaluator = evaluator_for(layers=2, tied=False)
    stored = evaluator.stored_nbytes(all_on(evaluator, Location.NVME))

    assert set(stored) == {Tier.NVME}
