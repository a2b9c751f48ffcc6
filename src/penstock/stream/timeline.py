"""When each operation of a step ran, from the marks that the step made anyway. Room: move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.schedule import Operation
from penstock.stream.watching import Passed
from penstock.transfers import Traffic, Transfer


@dataclass(frozen=True, slots=True)
class Event:
    """One operation. Seconds from the step's beginning."""

    operation: Operation
    start: float
    end: float
    transfers: tuple[Transfer, ...] = ()
    """What it moved."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def timeline(passed: Passed) -> list[Event]:
    """Every operation that ran, by its start. Adds no waiting: the run has ended."""
    device, program, origin = passed.device, passed.program, passed.origin
    traffic = Traffic.of(passed.inventory, passed.plan.workload, passed.plan.placement)
    found = []
    for at, began in passed.began.items():
        end = passed.ended.get(at)
        if end is None:
            continue
        start_at, end_at = (device.seconds(origin, mark) for mark in (began, end))
        op = program.operations[at]
        moved = traffic.transfers(op, passed.shapes[op.round] if passed.shapes else ())
        found.append(Event(op, start_at, max(start_at, end_at), moved))
    return sorted(found, key=lambda event: (event.start, event.end))


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
