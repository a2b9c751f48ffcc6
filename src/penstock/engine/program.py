"""Prepare a schedule for execution: resolve what each operation waits for and lay out buffers.

A schedule states the order in which buffers come and go, but not which bytes they use. Once two
buffers share bytes, the operation that begins to use the second one must also wait for the last
operation that used the first. `compile_program` adds those dependencies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.model.inventory import Inventory
from penstock.plan.lifetimes import (
    BufferKey,
    BufferLifetime,
    SumPart,
    gradient_lifetimes,
    gradient_sums,
    is_chunked,
    staging_lifetimes,
    state_lifetimes,
    weight_lifetimes,
)
from penstock.plan.packing import Packing, pack
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.roles import Formats, Role

INSTANT = (Verb.DROP, Verb.RELEASE)
"""Verbs that take no time and run on no lane: they only mark the end of a buffer's use."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The layout of one pool of temporary buffers."""

    packing: Packing[BufferKey]

    def offset(self, key: BufferKey) -> int:
        """Return a buffer's offset in the pool, in bytes."""
        return self.packing.offsets[key]

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self.packing.nbytes


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule with its dependencies resolved and its buffers laid out."""

    operations: tuple[Operation, ...]
    """The operations of the schedule, in order."""

    needs: tuple[tuple[int, ...], ...]
    """For each operation, the operations that must have ended. None of them is instant."""

    weights: Buffers
    """Slots for streamed weights, in HBM."""

    gradients: Buffers
    """Gradient sums and gradients that leave, in HBM."""

    staging: Buffers
    """Pieces read from NVMe, in host memory."""

    states: Buffers
    """Pieces stored in host memory while the GPU sweeps them, in HBM."""

    buffer_start: tuple[int, ...]
    """For each fetch and gather, the operation that begins its buffer: the block's first piece if
    the block is fetched in pieces. For all other operations, the operation itself."""

    read_of: tuple[int, ...]
    """For each operation on a piece, the read that filled its buffer in host staging, or the fetch
    that filled its buffer in HBM; -1 for all others, and for pieces that are swept where they are
    stored."""

    sums: Mapping[int, tuple[SumPart, ...]]
    """The gradient sums to which an operation adds; the block's own comes last."""

    exchange_of: Mapping[int, int]
    """With several ranks: by computation, the exchange of the gradients that it produces."""

    at: Mapping[tuple[Verb, int, int, Role | None], int]
    """Index of an operation by verb, block, round and, if it has only one, role."""

    held: frozenset[int] = frozenset()
    """See `Schedule.held`."""

    by_lane: Mapping[str, tuple[tuple[int, Operation], ...]] = field(init=False)
    """The operations of each lane, each with its index."""

    def __post_init__(self) -> None:
        lanes: dict[str, list[tuple[int, Operation]]] = {}
        for at, operation in enumerate(self.operations):
            lanes.setdefault(operation.lane, []).append((at, operation))
        object.__setattr__(self, "by_lane", {lane: tuple(ops) for lane, ops in lanes.items()})

    def is_chunked(self, part: SumPart) -> bool:
        """Return whether gradients that are exchanged are in fp32; see `lifetimes.is_chunked`."""
        return is_chunked(self.operations, part)


def compile_program(
    inventory: Inventory, placement: Placement, formats: Formats, schedule: Schedule
) -> Program:
    """Compile a schedule. This is a pure function: it allocates nothing."""
    weights = weight_lifetimes(schedule, placement)
    trains = any(op.verb is Verb.BACKWARD for op in schedule.operations)
    gradients = gradient_lifetimes(inventory, schedule, placement, formats) if trains else []
    staging = staging_lifetimes(inventory, schedule, placement, formats)
    states = state_lifetimes(inventory, schedule, placement, formats)
    pools = (weights, gradients, staging, states)
    # The planner sizes the pools with the same effort: more refinements could pack differently.
    packed = [pack(lifetimes, refinements=0) for lifetimes in pools]
    after: list[set[int]] = [set(op.after) for op in schedule.operations]
    for lifetimes, packing in zip(pools, packed, strict=True):
        for begins, ended in _successions(lifetimes, packing):
            after[begins].add(ended)
    sums = list(gradient_sums(inventory, schedule)) if trains else []
    return Program(
        operations=schedule.operations,
        needs=_resolve_instant(schedule.operations, after),
        weights=Buffers(packed[0]),
        gradients=Buffers(packed[1]),
        staging=Buffers(packed[2]),
        states=Buffers(packed[3]),
        buffer_start=_buffer_starts(schedule.operations),
        read_of=_reads(schedule.operations),
        sums={at: tuple(parts) for at, parts in itertools.groupby(sums, lambda part: part.at)},
        exchange_of={p.computed_at: p.at for p in sums if p.at != p.computed_at},
        at={
            (op.verb, op.block, op.round, op.roles[0] if len(op.roles) == 1 else None): at
            for at, op in enumerate(schedule.operations)
        },
        held=schedule.held,
    )


def _successions(
    lifetimes: Sequence[BufferLifetime], packing: Packing[BufferKey]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of operations: one begins a buffer, the other ended the one before it.

    Only the last previous owner of each byte counts. Owners before that had ended when the last
    one began, so waiting for the last one is enough.
    """
    # Ranges of the pool, each with the operation that ended its last buffer.
    last_owners: list[tuple[int, int, int]] = []
    for item in sorted(lifetimes, key=lambda item: item.start):
        low = packing.offsets[item.key]
        high = low + item.nbytes
        remaining: list[tuple[int, int, int]] = []
        for start, stop, ended in last_owners:
            if start < high and low < stop:
                yield item.start, ended
                # The previous owner still owns the bytes outside the new buffer.
                remaining += [(start, low, ended)] if start < low else []
                remaining += [(high, stop, ended)] if high < stop else []
            else:
                remaining.append((start, stop, ended))
        last_owners = [*remaining, (low, high, item.end - 1)]


def _resolve_instant(
    operations: Sequence[Operation], after: Sequence[set[int]]
) -> tuple[tuple[int, ...], ...]:
    """Replace each wait for an instant operation by what that operation waits for."""
    resolved: list[tuple[int, ...]] = []
    for waits in after:
        needs: set[int] = set()
        for at in waits:
            needs |= set(resolved[at]) if operations[at].verb in INSTANT else {at}
        resolved.append(tuple(sorted(needs)))
    return tuple(resolved)


def _buffer_starts(operations: Sequence[Operation]) -> tuple[int, ...]:
    """Return `Program.buffer_start`: the pieces of a block's weights share one buffer."""
    open_buffers: dict[tuple[int, object], int] = {}
    starts = []
    for at, op in enumerate(operations):
        buffer = (op.block, op.roles)
        if op.verb is Verb.FETCH and not op.gpu:
            starts.append(open_buffers.setdefault(buffer, at))
            continue
        if op.verb is Verb.DROP:
            open_buffers.pop(buffer, None)
        # What is gathered is in the buffer into which the rank's own shard was fetched.
        starts.append(open_buffers.get(buffer, at) if op.verb is Verb.GATHER else at)
    return tuple(starts)


def _reads(operations: Sequence[Operation]) -> tuple[int, ...]:
    """Return `Program.read_of`."""
    latest: dict[tuple[int, int], int] = {}
    reads = []
    for at, op in enumerate(operations):
        if op.piece is None:
            reads.append(-1)
            continue
        if op.verb is Verb.READ or (op.verb is Verb.FETCH and op.gpu):
            latest[op.block, op.piece] = at
        reads.append(latest.get((op.block, op.piece), -1))
    return tuple(reads)
