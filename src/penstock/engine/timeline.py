"""When each operation of a step ran, from the marks that the step made anyway. Room: move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.engine.allocate import Part
from penstock.engine.step_records import StepRecord
from penstock.plan.schedule import Operation
from penstock.plan.traffic import Traffic, Transfer
from penstock.roles import Role


@dataclass(frozen=True, slots=True)
class Event:
    """One operation, or one micro-batch of it. Seconds from the step's beginning."""

    operation: Operation
    start: float
    end: float
    transfers: tuple[Transfer, ...] = ()
    """What it moved."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


Moved = Mapping[Part, tuple[Transfer, ...]]
"""What each part of a program moves."""


def moved(passed: StepRecord) -> Moved:
    """The same for every run of a program with batches of the same shape."""
    traffic = Traffic.of(passed.inventory, passed.plan.workload, passed.plan.placement)
    operations = passed.program.operations
    shapes = passed.shapes or [()] * (1 + max(op.round for op in operations))
    found: dict[Part, tuple[Transfer, ...]] = {}
    for at, op in enumerate(operations):
        found[at] = traffic.transfers(op, shapes[op.round])
        if op.roles == (Role.INPUT,):
            for micro, shape in enumerate(shapes[op.round]):
                found[at, micro] = traffic.transfers(op, [shape])
    return found


def place(part: Part) -> int:
    """The operation's."""
    return part[0] if isinstance(part, tuple) else part


def timeline(passed: StepRecord, transfers: Moved | None = None) -> list[Event]:
    """All that ran, by its start. Adds no waiting: the run has ended. A sweep on the CPU may begin
    while another has not ended: it is told from that one's end on."""
    transfers = moved(passed) if transfers is None else transfers
    found = []
    for part, began in passed.began.items():
        end = passed.ended.get(part)
        if end is None:
            continue
        start_at, end_at = (passed.device.seconds(passed.origin, mark) for mark in (began, end))
        op = passed.program.operations[place(part)]
        found.append(Event(op, start_at, max(start_at, end_at), transfers[part]))
    return sorted(_one_by_one(found), key=lambda event: (event.start, event.end))


def _one_by_one(events: Iterable[Event]) -> Iterator[Event]:
    reached = 0.0
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        if event.operation.lane == "sweep":
            start = min(max(event.start, reached), event.end)
            reached = max(reached, event.end)
            yield replace(event, start=start)
        else:
            yield event


def busy(events: Iterable[Event]) -> dict[str, float]:
    """Per lane, the seconds in which it had something under way."""
    by_lane: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_lane[event.operation.lane].append(event)
    return {lane: _union(listed) for lane, listed in sorted(by_lane.items())}


def idle(events: Sequence[Event], lane: str) -> list[tuple[float, float, Operation]]:
    """Gaps of a lane: from when to when, and the operation that ended each."""
    own = sorted((e for e in events if e.operation.lane == lane), key=lambda e: e.start)
    gaps, reached = [], 0.0
    for event in own:
        if event.start > reached:
            gaps.append((reached, event.start, event.operation))
        reached = max(reached, event.end)
    return gaps


def _union(events: list[Event]) -> float:
    total, reached = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total
