"""Activations overlaid on gradients never exist at the same time as those gradients."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.allocate import Programs
from penstock.engine.program import INSTANT, Program
from penstock.plan.activation_overlay import (
    HOST,
    gradient_order,
    overlaid_activations,
    overlaid_nbytes,
)
from penstock.plan.schedule import Operation, Verb
from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from penstock.roles import Role
from penstock.tiers import Tier
from tests.support.schedule_checker import all_on, cases, evaluator_for

Key = tuple[int, Role]
"""A block, and its activation or the results of its attention."""

Range = tuple[int | None, int, int]
"""A node, or None for HBM, and a range of bytes counted through its gradients."""


def ranges(
    evaluator: PlanEvaluator, candidate: Candidate
) -> tuple[dict[int, Range], dict[Key, Range]]:
    """Return the ranges of gradients and of overlaid activations, by block."""
    blocks = evaluator.placement(candidate).blocks
    gradients: dict[int, Range] = {}
    ends: dict[int, int] = {}
    for index in gradient_order(blocks):
        home = blocks[index].home(Role.GRADIENT)
        tiers = (*HOST, Tier.HBM)
        if home is not None and len(home.shares) == 1 and home.shares[0].tier in tiers:
            node = home.shares[0].node  # None for HBM
            start = ends.get(node, 0)
            ends[node] = start + home.nbytes
            gradients[index] = (node, start, ends[node])
    activations: dict[Key, Range] = {}
    work, rounds = evaluator.workload, candidate.rounds
    for (index, role), overlaid in overlaid_activations(
        blocks, rounds=rounds, accumulate=work.accumulate, in_hbm=work.sums_apart(rounds)
    ).items():
        home = blocks[index].home(role)
        assert home is not None
        activations[index, role] = (overlaid.node, overlaid.offset, overlaid.offset + home.nbytes)
    return gradients, activations


def overlap(one: Range, other: Range) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


@settings(max_examples=50, deadline=None)
@given(cases())
def test_activations_lie_in_gradients_of_earlier_blocks_and_never_overlap(
    case: tuple[PlanEvaluator, Candidate],
) -> None:
    gradients, activations = ranges(*case)
    for key, activation in activations.items():
        underlying = [j for j, gradient in gradients.items() if overlap(activation, gradient)]
        covered = sum(
            min(activation[2], gradients[j][2]) - max(activation[1], gradients[j][1])
            for j in underlying
        )
        assert covered == activation[2] - activation[1]
        assert max(underlying) < key[0]
        assert not any(overlap(activation, other) for k, other in activations.items() if k != key)


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 1 << 30))
def test_an_activation_is_written_after_the_sweep_and_read_before_the_next_gradient(
    case: tuple[PlanEvaluator, Candidate], seed: int
) -> None:
    """This holds in every order that lanes may take."""
    evaluator, candidate = case
    gradients, activations = ranges(evaluator, candidate)
    plan = plan_result(evaluator, candidate).plan
    programs = Programs.of(plan, evaluator.inventory)
    for program in (programs["step"], programs["first"]):
        for key, activation in activations.items():
            underlying = {j for j, gradient in gradients.items() if overlap(activation, gradient)}
            assert_disjoint_in_time(program, key, underlying, random.Random(seed))


def assert_disjoint_in_time(
    program: Program, key: Key, underlying: set[int], random_source: random.Random
) -> None:
    started, ended = replay(program, random_source)
    block, role = key
    in_hbm = not indices(program, block, Verb.OFFLOAD, role)
    # In HBM, the block itself writes and reads them, and stores the gradient when it ends.
    (written,) = indices(program, block, *((Verb.FORWARD,) if in_hbm else (Verb.OFFLOAD, role)))
    (read,) = indices(program, block, *((Verb.BACKWARD,) if in_hbm else (Verb.FETCH, role)))
    for gradient_block in underlying:
        sweeps = [
            at for at, op in enumerate(program.operations)
            if op.verb is Verb.SWEEP and op.block == gradient_block
        ]  # fmt: skip
        assert all(ended[at] < started[written] for at in sweeps), (
            "the sweep has consumed the gradient"
        )
        stored = (Verb.BACKWARD,) if in_hbm else (Verb.OFFLOAD, Role.GRADIENT)
        (offloaded,) = indices(program, gradient_block, *stored)
        assert ended[read] < started[offloaded], "backward has read the activation"


def indices(program: Program, block: int, verb: Verb, *roles: Role) -> list[int]:
    def fits(op: Operation) -> bool:
        return op.verb is verb and op.block == block and op.roles == roles

    return [at for at, op in enumerate(program.operations) if fits(op)]


def replay(program: Program, random_source: random.Random) -> tuple[dict[int, int], dict[int, int]]:
    """Return when each operation starts and ends if lanes run in a random order.

    Several sweeps may run concurrently.
    """
    lanes: dict[str, list[int]] = {}
    for at, op in enumerate(program.operations):
        if op.verb not in INSTANT:
            lanes.setdefault(op.lane, []).append(at)
    running: dict[int, str] = {}
    started: dict[int, int] = {}
    ended: dict[int, int] = {}
    clock = 0
    while any(lanes.values()) or running:
        busy = set(running.values()) - {"sweep"}
        ready = [
            todo[0]
            for lane, todo in lanes.items()
            if todo and lane not in busy and ended.keys() >= set(program.needs[todo[0]])
        ]
        verb, at = random_source.choice(
            [*(("start", r) for r in ready), *(("end", r) for r in running)]
        )
        clock += 1
        if verb == "start":
            running[at] = program.operations[at].lane
            lanes[running[at]].pop(0)
            started[at] = clock
        else:
            del running[at]
            ended[at] = clock
    return started, ended


def test_nothing_is_overlaid_if_gradients_exist_all_the_time() -> None:
    for rounds, accumulate in ((2, False), (1, True)):
        evaluator = evaluator_for(layers=4, tied=False, accumulate=accumulate)
        candidate = replace(all_on(evaluator, Location.DRAM), rounds=rounds)
        assert not evaluator.overlaid_nbytes(candidate)[Tier.DRAM]


def test_activations_smaller_than_gradients_need_no_memory() -> None:
    evaluator = evaluator_for(layers=4, tied=False)
    candidate = all_on(evaluator, Location.DRAM)
    plan = plan_result(evaluator, candidate).plan
    activations = 4 * evaluator.group_nbytes(1, "activation", 1)

    assert overlaid_nbytes(evaluator.placement(candidate).blocks)[Tier.DRAM] == activations
    assert plan.activations(Tier.DRAM) == 0
    assert plan.peak(Tier.DRAM) == evaluator.total_nbytes(candidate)[Tier.DRAM]
