"""Programs fit the pools that the plan has, and no two live buffers share bytes in any order that
lanes may take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.allocate import Programs
from penstock.engine.program import INSTANT, Buffers, Program
from penstock.plan.schedule import COMPUTE, Operation, Verb
from penstock.plan.weight_window import StepFacts
from penstock.planner.choice import Choice
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import planned
from penstock.roles import Role
from tests.support.walker import cases

POOLS = {"weights": "weight slots", "gradients": "gradient buffers", "staging": "NVMe staging"}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_planned_pools_are_enough_for_every_program(case: tuple[PlanEvaluator, Choice]) -> None:
    desk, choice = case
    plan = planned(desk, choice).plan
    programs = Programs.of(plan, desk.inventory)

    held = {pool.what: pool.nbytes for pool in plan.pools}
    for name, what in POOLS.items():
        assert programs.nbytes(name) == held.get(what, 0), what


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 1 << 30))
def test_no_two_live_buffers_share_bytes_whatever_lanes_do(
    case: tuple[PlanEvaluator, Choice], seed: int
) -> None:
    desk, choice = case
    plan = planned(desk, choice).plan
    programs = Programs.of(plan, desk.inventory)
    facts = StepFacts.of(desk.inventory, plan.placement)
    kinds = [programs.step, programs.first, programs.sweep, programs.evaluate]
    if desk.workload.accumulate:
        kinds.append(programs.again)
    for program in kinds:
        uses = list(all_uses(program, facts))
        for run in range(2):
            replay(program, uses, random.Random(seed + run))


@dataclass(slots=True)
class Use:
    """A buffer, and the operations that read or write it."""

    name: str
    pool: str
    low: int
    high: int
    operations: set[int] = field(default_factory=set)

    def clashes(self, other: Use) -> bool:
        return self.pool == other.pool and self.low < other.high and other.low < self.high


def all_uses(program: Program, facts: StepFacts) -> Iterator[Use]:
    """Who uses which bytes: from what operations do, not from what the program says of them."""
    for pool in POOLS:
        buffers: Buffers = getattr(program, pool)
        for name, low in buffers.packing.offsets.items():
            what, block, since = name.split()
            use = Use(name, pool, low, low + buffers.packing.sizes[name])
            use.operations = users(program, facts, what, int(block), int(since[1:]))
            assert use.operations, name
            yield use


def users(program: Program, facts: StepFacts, what: str, block: int, since: int) -> set[int]:
    if what == "staged":
        touched = (Verb.READ, Verb.SWEEP, Verb.WRITE, Verb.FETCH)
        return {
            at
            for at, op in enumerate(program.operations)
            if op.verb in touched and program.read_of[at] == since
        }
    found: set[int] = set()
    for at in range(since, len(program.operations)):
        op = program.operations[at]
        if ends(op, what, block):
            # A sum is read last where it is rounded; others end when nobody uses them any more.
            return found | ({at} if what == "sum" else set())
        if touches(op, facts, what, block):
            found.add(at)
    return found


def ends(op: Operation, what: str, block: int) -> bool:
    if what == "sum":
        return op.verb in (Verb.LOSS, Verb.BACKWARD) and op.block == block
    role = Role.WEIGHT if what == "weight" else Role.GRADIENT
    return op.verb is Verb.DROP and op.block == block and op.roles == (role,)


def touches(op: Operation, facts: StepFacts, what: str, block: int) -> bool:
    if what == "weight":
        reads = op.verb in COMPUTE and block in facts.owners(op.block)
        if op.verb is Verb.BACKWARD and op.block == 0:
            reads = False  # tables are linear
        return reads or (op.verb is Verb.FETCH and op.block == block and op.roles == (Role.WEIGHT,))
    adds = op.phase == "backward" and op.verb in (Verb.LOSS, Verb.BACKWARD)
    moves = op.verb in (Verb.FETCH, Verb.DRAIN) and op.roles == (Role.GRADIENT,)
    return (adds and block in facts.adds_to(op.block)) or (moves and op.block == block)


def replay(program: Program, uses: list[Use], drawn: random.Random) -> None:
    """Lanes take their operations in order, each when what it needs has ended and, but for sweeps,
    the one before; which lane moves next is up to the dice. A buffer lives from its first use's
    start to its last use's end."""
    lanes: dict[str, list[int]] = {}
    for at, op in enumerate(program.operations):
        if op.verb not in INSTANT:
            lanes.setdefault(op.lane, []).append(at)
    of: dict[int, list[Use]] = {}
    for use in uses:
        for at in use.operations:
            of.setdefault(at, []).append(use)
    left = {id(use): len(use.operations) for use in uses}
    running: dict[int, str] = {}
    ended: set[int] = set()
    live: dict[int, Use] = {}
    while any(lanes.values()) or running:
        held = set(running.values()) - {"sweep"}
        ready = [
            todo[0]
            for lane, todo in lanes.items()
            if todo and lane not in held and ended.issuperset(program.needs[todo[0]])
        ]
        moves = [("start", at) for at in ready] + [("end", at) for at in running]
        assert moves, "every lane waits for another"
        verb, at = drawn.choice(moves)
        if verb == "start":
            running[at] = program.operations[at].lane
            lanes[running[at]].pop(0)
            for use in of.get(at, ()):
                if id(use) not in live:
                    for other in live.values():
                        assert not use.clashes(other), (use, other)
                    live[id(use)] = use
        else:
            del running[at]
            ended.add(at)
            for use in of.get(at, ()):
                left[id(use)] -= 1
                if not left[id(use)]:
                    del live[id(use)]
