"""When each operation of a step ran, from the marks that the step made anyway. Room: move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.schedule import Operation
from penstock.stream.device import Device, Mark
from penstock.stream.disk import Tickets
from penstock.stream.state import Run


@dataclass(frozen=True, slots=True)
class Event:
    """One operation. Seconds from the step's beginning."""

    operation: Operation
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def timeline(run: Run, device: Device) -> list[Event]:
    """Every operation that ran, by its start. Adds no waiting: the run has ended."""
    assert run.origin is not None
    found = []
    for at, began in run.began.items():
        end = _end(run.marks.get(at))
        if end is None:
            continue
        start_at, end_at = (device.seconds(run.origin, mark) for mark in (began, end))
        found.append(Event(run.program.operations[at], start_at, max(start_at, end_at)))
    return sorted(found, key=lambda event: (event.start, event.end))


def _end(mark: Mark) -> Mark | None:
    return mark.ended if isinstance(mark, Tickets) else mark


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
