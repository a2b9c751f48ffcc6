"""Ranks that run one program never wait for each other in a circle, whatever order lanes take."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.engine.allocate import Programs
from penstock.engine.program import INSTANT, Program
from penstock.plan.buffers import deal_micro_batches
from penstock.plan.schedule import COLLECTIVE, Verb
from penstock.plan.workload import Workload
from penstock.planner.candidate import Candidate
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from tests.support.schedule_checker import cases

Unit = tuple[int, int]
"""An operation, and a micro-batch of a computation whose gradients are sent, or a wave of their
exchange; 0 for all other operations."""


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 1 << 30))
def test_ranks_do_not_wait_in_a_circle(case: tuple[PlanEvaluator, Candidate], seed: int) -> None:
    evaluator, candidate = case
    assume(evaluator.workload.world > 1)
    programs = Programs.of(plan_result(evaluator, candidate).plan, evaluator.inventory)
    for program in (programs["step"], programs["first"], programs["sweep"], programs["evaluate"]):
        replay(program, evaluator.workload, candidate.rounds, random.Random(seed))


@dataclass(slots=True)
class Rank:
    """One rank's lanes, and the units that have ended."""

    lanes: dict[str, list[Unit]]
    last: dict[int, Unit]
    """The last unit of each operation."""
    ended: set[Unit] = field(default_factory=set)

    def has_ended(self, at: int) -> bool:
        return self.last[at] in self.ended


def units_of(program: Program, at: int, workload: Workload, rounds: int, rank: int) -> int:
    """Return into how many units an operation is divided on a rank."""
    op = program.operations[at]
    micros = range(workload.micro_batches)
    if at in program.exchange_of:
        return len(deal_micro_batches(micros, workload, rounds, rank)[op.round])
    if op.verb is Verb.EXCHANGE:
        return len(deal_micro_batches(micros, workload, rounds, 0)[op.round])
    return 1


def make_rank(program: Program, workload: Workload, rounds: int, rank: int) -> Rank:
    made = Rank({}, {})
    for at, op in enumerate(program.operations):
        if op.verb not in INSTANT:
            count = max(1, units_of(program, at, workload, rounds, rank))
            made.lanes.setdefault(op.lane, []).extend((at, n) for n in range(count))
            made.last[at] = (at, count - 1)
    return made


def replay(program: Program, workload: Workload, rounds: int, source: random.Random) -> None:
    """Run the units of all ranks in a random order.

    As in the engine, a computation whose gradients are sent waits before each micro-batch but the
    first until the one before it was sent. A wave waits for the micro-batch of each rank that has
    one, and a collective operation for all ranks.
    """
    ranks = [make_rank(program, workload, rounds, r) for r in range(workload.world)]
    while any(lane for rank in ranks for lane in rank.lanes.values()):
        moves = [
            (rank, lane)
            for number, rank in enumerate(ranks)
            for lane, units in rank.lanes.items()
            if units and lane != "ranks" and is_ready(program, rank, units[0])
        ]
        together = [rank.lanes.get("ranks") for rank in ranks]
        if all(together):
            heads = {units[0] for units in together if units}
            assert len(heads) == 1, "all ranks make the same collective calls in the same order"
            if all(may_join(program, workload, rounds, ranks, n) for n in range(len(ranks))):
                moves.append((ranks[0], "ranks"))
        assert moves, "every lane of every rank waits for another"
        rank, lane = source.choice(moves)
        for each in ranks if lane == "ranks" else [rank]:
            each.ended.add(each.lanes[lane].pop(0))


def is_ready(program: Program, rank: Rank, unit: Unit) -> bool:
    at, number = unit
    exchange = program.exchange_of.get(at)
    if number and exchange is not None and (exchange, number - 1) not in rank.ended:
        return False
    return all(rank.has_ended(need) for need in program.needs[at])


def may_join(
    program: Program, workload: Workload, rounds: int, ranks: list[Rank], number: int
) -> bool:
    """Return whether a rank has what it needs for its next collective unit."""
    rank = ranks[number]
    at, wave = rank.lanes["ranks"][0]
    assert program.operations[at].verb in COLLECTIVE
    needs = set(program.needs[at])
    if program.operations[at].verb is Verb.EXCHANGE:
        computed = program.sums[at][0].computed_at
        needs.discard(computed)
        has_one = wave < units_of(program, computed, workload, rounds, number)
        if has_one and (computed, wave) not in rank.ended:
            return False
    return all(rank.has_ended(need) for need in needs)
