"""A schedule made ready to run: what operations wait for, where buffers are. Room: move.

The schedule says in which order buffers come and go; two that share bytes must also come and go in
that order, so whatever begins to use bytes waits for what ended the use before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.plan.lifetimes import gradient_lifetimes, staging_lifetimes, weight_lifetimes
from penstock.plan.packing import Lifetime, Packing, pack
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.roles import Formats, Role

INSTANT = (Verb.DROP, Verb.RELEASE)


@dataclass(frozen=True, slots=True)
class Buffers:
    """One kind of passing buffer: where each lies in its pool."""

    packing: Packing

    def offset(self, what: str, block: int, since: int) -> int:
        return self.packing.offsets[_name(what, block, since)]

    def has(self, what: str, block: int, since: int) -> bool:
        return _name(what, block, since) in self.packing.offsets

    @property
    def nbytes(self) -> int:
        return self.packing.nbytes


@dataclass(frozen=True, slots=True)
class Program:
    """One kind of step."""

    operations: tuple[Operation, ...]
    needs: tuple[tuple[int, ...], ...]
    """Per operation, those that must have ended: never an instant one."""
    weights: Buffers
    gradients: Buffers
    staging: Buffers
    since: tuple[int, ...]
    """Per fetch, the operation that began its buffer: for a piece, its block's first piece."""
    read_of: tuple[int, ...]
    """Per operation on a piece in staging, the read that brought it there; -1 for others."""
    at: Mapping[tuple[Verb, int, int, Role | None], int]
    """Where a verb is done to a block in a round; for moves, to which role."""


def compile_program(
    inventory: Inventory, placement: Placement, formats: Formats, schedule: Schedule
) -> Program:
    """Pure: nothing is taken here."""
    weights = weight_lifetimes(schedule, placement)
    gradients = (
        gradient_lifetimes(inventory, schedule, placement, formats)
        if any(op.verb is Verb.BACKWARD for op in schedule.operations)
        else []
    )
    staging = staging_lifetimes(inventory, schedule, placement, formats)
    packed = [pack(lifetimes, mendings=0) for lifetimes in (weights, gradients, staging)]
    after: list[set[int]] = [set(op.after) for op in schedule.operations]
    for lifetimes, packing in zip((weights, gradients, staging), packed, strict=True):
        for begins, ended in _successions(lifetimes, packing):
            after[begins].add(ended)
    return Program(
        operations=schedule.operations,
        needs=_resolved(schedule.operations, after),
        weights=Buffers(packed[0]),
        gradients=Buffers(packed[1]),
        staging=Buffers(packed[2]),
        since=_since(schedule.operations),
        read_of=_read_of(schedule.operations),
        at={
            (op.verb, op.block, op.round, op.roles[0] if len(op.roles) == 1 else None): at
            for at, op in enumerate(schedule.operations)
        },
    )


def _successions(lifetimes: Sequence[Lifetime], packing: Packing) -> Iterator[tuple[int, int]]:
    """Pairs: the operation that begins a buffer, and one that ended the buffer in the same bytes
    just before. Whoever was there still earlier had ended before that one began."""
    held: list[tuple[int, int, int]] = []  # from, to, and what ended the last buffer there
    for item in sorted(lifetimes, key=lambda item: item.start):
        low = packing.offsets[item.name]
        high = low + item.nbytes
        kept: list[tuple[int, int, int]] = []
        for start, stop, ended in held:
            if start < high and low < stop:
                yield item.start, ended
                kept += [(start, low, ended)] if start < low else []
                kept += [(high, stop, ended)] if high < stop else []
            else:
                kept.append((start, stop, ended))
        held = [*kept, (low, high, item.end - 1)]


def _resolved(
    operations: Sequence[Operation], after: Sequence[set[int]]
) -> tuple[tuple[int, ...], ...]:
    """Waiting for an instant operation is waiting for what it waits for."""
    done: list[tuple[int, ...]] = []
    for waits in after:
        found: set[int] = set()
        for at in waits:
            found |= set(done[at]) if operations[at].verb in INSTANT else {at}
        done.append(tuple(sorted(found)))
    return tuple(done)


def _since(operations: Sequence[Operation]) -> tuple[int, ...]:
    """Pieces of one block's weights share the buffer that the first of them began."""
    began: dict[tuple[int, object], int] = {}
    found = []
    for at, op in enumerate(operations):
        key = (op.block, op.roles)
        if op.verb is Verb.FETCH:
            found.append(began.setdefault(key, at))
            continue
        if op.verb is Verb.DROP:
            began.pop(key, None)
        found.append(at)
    return tuple(found)


def _read_of(operations: Sequence[Operation]) -> tuple[int, ...]:
    latest: dict[tuple[int, int], int] = {}
    found = []
    for at, op in enumerate(operations):
        if op.piece is None:
            found.append(-1)
            continue
        if op.verb is Verb.READ:
            latest[op.block, op.piece] = at
        found.append(latest[op.block, op.piece])
    return tuple(found)


def _name(what: str, block: int, since: int) -> str:
    return f"{what} {block} @{since}"
