"""Compiled programs fit the planned pools, and live buffers never share bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.allocate import Programs
from penstock.engine.program import INSTANT, Buffers, Program, _successions
from penstock.plan.buffers import STATES, states_nbytes
from penstock.plan.lifetimes import BufferKey, BufferKind
from penstock.plan.packing import Lifetime, Packing
from penstock.plan.placement_index import PlacementIndex
from penstock.plan.schedule import COMPUTE, Operation, Verb
from penstock.planner.candidate import Candidate, Location
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.planner import plan_result
from penstock.roles import Role
from tests.support.schedule_checker import all_on, cases, evaluator_for

POOLS = {
    "weights": "weight slots",
    "gradients": "gradient buffers",
    "staging": "NVMe staging",
    "states": STATES,
}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_program_fits_the_planned_pools(case: tuple[PlanEvaluator, Candidate]) -> None:
    evaluator, candidate = case
    plan = plan_result(evaluator, candidate).plan
    programs = Programs.of(plan, evaluator.inventory)

    held = {pool.what: pool.nbytes for pool in plan.pools}
    for name, what in POOLS.items():
        nbytes = programs.nbytes(name)
        if what == STATES:
            nbytes = states_nbytes(nbytes, on_gpu=True)
        assert nbytes == held.get(what, 0), what


def test_sweeps_alone_use_all_of_a_steps_staging() -> None:
    evaluator = evaluator_for(3, tied=False, piece=1 << 16)
    plan = plan_result(evaluator, all_on(evaluator, Location.NVME)).plan
    programs = Programs.of(plan, evaluator.inventory)

    assert plan.placement.pieces_staged > 1
    for program in (programs["step"], programs["sweep"]):
        held = most = 0
        for op in program.operations:
            held += (op.verb is Verb.READ) - (op.verb is Verb.RELEASE)
            most = max(most, held)
        assert most == plan.placement.pieces_staged


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 1 << 30))
def test_live_buffers_never_share_bytes_whatever_order_lanes_take(
    case: tuple[PlanEvaluator, Candidate], seed: int
) -> None:
    evaluator, candidate = case
    plan = plan_result(evaluator, candidate).plan
    programs = Programs.of(plan, evaluator.inventory)
    index = PlacementIndex.of(evaluator.inventory, plan.placement)
    kinds = [programs["step"], programs["first"], programs["sweep"], programs["evaluate"]]
    if evaluator.workload.accumulate:
        kinds.append(programs["accumulate"])
    for program in kinds:
        uses = list(all_uses(program, index))
        for run in range(2):
            replay(program, uses, random.Random(seed + run))


@dataclass(slots=True)
class BufferUse:
    """A buffer, and the operations that read or write it."""

    key: BufferKey
    pool: str
    low: int
    high: int
    operations: set[int] = field(default_factory=set)

    def overlaps(self, other: BufferUse) -> bool:
        return self.pool == other.pool and self.low < other.high and other.low < self.high


def all_uses(program: Program, index: PlacementIndex) -> Iterator[BufferUse]:
    """Yield who uses which bytes, derived from what operations do, not from `program.needs`."""
    for pool in POOLS:
        buffers: Buffers = getattr(program, pool)
        for key, low in buffers.packing.offsets.items():
            use = BufferUse(key, pool, low, low + buffers.packing.sizes[key])
            use.operations = users(program, index, key)
            assert use.operations, key
            yield use


def users(program: Program, index: PlacementIndex, key: BufferKey) -> set[int]:
    """Return the operations that read or write a buffer."""
    if key.kind is BufferKind.STAGING:
        staged = (Verb.READ, Verb.SWEEP, Verb.WRITE, Verb.FETCH)
        return {
            at
            for at, op in enumerate(program.operations)
            if op.verb in staged and program.read_of[at] == key.start
        }
    if key.kind is BufferKind.STATES:
        return {
            at
            for at, op in enumerate(program.operations)
            if op.gpu and op.verb is not Verb.DROP and program.read_of[at] == key.start
        }
    if key.kind in (BufferKind.SENT, BufferKind.RECEIVED):
        exchange = program.exchange_of.get(key.start, key.start)
        return {key.start, exchange}
    operations: set[int] = set()
    for at in range(key.start, len(program.operations)):
        op = program.operations[at]
        if ends(op, key, index.ranks):
            # The operation that ends a sum reads it to round it. All others only drop the buffer.
            return operations | ({at} if key.kind is BufferKind.GRADIENT_SUM else set())
        if touches(op, index, key):
            operations.add(at)
    return operations


def ends(op: Operation, key: BufferKey, ranks: int) -> bool:
    if key.kind is BufferKind.GRADIENT_SUM:
        adding = (Verb.LOSS, Verb.BACKWARD) if ranks == 1 else (Verb.EXCHANGE,)
        return op.verb in adding and op.block == key.block
    role = Role.WEIGHT if key.kind is BufferKind.WEIGHT else Role.GRADIENT
    return op.verb is Verb.DROP and op.block == key.block and op.roles == (role,)


def touches(op: Operation, index: PlacementIndex, key: BufferKey) -> bool:
    block = key.block
    if key.kind is BufferKind.WEIGHT:
        reads = op.verb in COMPUTE and block in index.owners(op.block)
        if op.verb is Verb.BACKWARD and op.block == 0:
            reads = False  # the backward of an embedding does not read its table
        arrives = op.verb in (Verb.FETCH, Verb.GATHER) and op.roles == (Role.WEIGHT,)
        return reads or (arrives and op.block == block)
    adding = (Verb.LOSS, Verb.BACKWARD) if index.ranks == 1 else (Verb.EXCHANGE,)
    adds = op.phase == "backward" and op.verb in adding
    moves = op.verb in (Verb.FETCH, Verb.OFFLOAD) and op.roles == (Role.GRADIENT,)
    return (adds and block in index.adds_to(op.block)) or (moves and op.block == block)


def replay(program: Program, uses: list[BufferUse], random_source: random.Random) -> None:
    """Run the lanes in a random order, and assert that live buffers never overlap.

    Each lane takes its operations in order, each when what it needs has ended and, except on the
    sweep lane, when the one before it has ended. A buffer lives from the start of its first use
    to the end of its last.
    """
    lanes: dict[str, list[int]] = {}
    for at, op in enumerate(program.operations):
        if op.verb not in INSTANT:
            lanes.setdefault(op.lane, []).append(at)
    uses_of: dict[int, list[BufferUse]] = {}
    for use in uses:
        for at in use.operations:
            uses_of.setdefault(at, []).append(use)
    uses_left = {id(use): len(use.operations) for use in uses}
    running: dict[int, str] = {}
    ended: set[int] = set()
    live: dict[int, BufferUse] = {}
    while any(lanes.values()) or running:
        busy = set(running.values()) - {"sweep"}
        ready = [
            todo[0]
            for lane, todo in lanes.items()
            if todo and lane not in busy and ended.issuperset(program.needs[todo[0]])
        ]
        moves = [("start", at) for at in ready] + [("end", at) for at in running]
        assert moves, "every lane waits for another"
        verb, at = random_source.choice(moves)
        if verb == "start":
            running[at] = program.operations[at].lane
            lanes[running[at]].pop(0)
            for use in uses_of.get(at, ()):
                if id(use) not in live:
                    for other in live.values():
                        assert not use.overlaps(other), (use, other)
                    live[id(use)] = use
        else:
            del running[at]
            ended.add(at)
            for use in uses_of.get(at, ()):
                uses_left[id(use)] -= 1
                if not uses_left[id(use)]:
                    del live[id(use)]


def test_a_buffer_waits_for_every_earlier_owner_of_its_bytes() -> None:
    """The middle of the first buffer is reused; both of its ends still belong to it."""

    def buffer(number: int, low: int, high: int, start: int, end: int) -> Lifetime[BufferKey]:
        key = BufferKey(BufferKind.WEIGHT, number, start)
        offsets[key] = low
        return Lifetime(key=key, nbytes=high - low, start=start, end=end)

    offsets: dict[BufferKey, int] = {}
    lifetimes = [
        buffer(0, 0, 90, 0, 5),
        buffer(1, 30, 60, 5, 20),
        buffer(2, 0, 30, 6, 20),
        buffer(3, 60, 90, 7, 20),
        buffer(4, 0, 90, 20, 25),
    ]
    sizes = {item.key: item.nbytes for item in lifetimes}
    packing = Packing(offsets=offsets, sizes=sizes, nbytes=90, peak=90)

    found = set(_successions(lifetimes, packing))

    assert found == {(5, 4), (6, 4), (7, 4), (20, 19)}
