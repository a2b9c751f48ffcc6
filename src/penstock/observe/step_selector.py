"""Choose the steps whose events are kept: the first, the last, the slowest, and exact ones.

A step of a Penstock engine is a thousand events or more. They are created only for the steps that
are kept, so the cost of recording does not grow with the length of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.observe.record_lines import line_of
from penstock.observe.records import Event
from penstock.observe.run_files import RunFolder

FIRST, LAST, SLOWEST = 3, 3, 3
"""Number of first, last and slowest steps that are kept."""

EVERY = 5.0
"""Seconds after which the newest step is written in any case: a program that is killed cannot
write its last steps."""

MakeEvents = Callable[[], list[Event]]


@dataclass(slots=True, eq=False)
class CandidateStep:
    """A step that may be kept."""

    number: int
    seconds: float
    make_events: list[MakeEvents]
    """Functions that create the events of the step, and of the sweeps that followed it."""

    written: bool = False
    lines: list[str] = field(default_factory=list)
    """Its events as lines, while it is one of the slowest."""


class StepSelector:
    """Decides which steps are written to a run's directory. Used by the recorder's thread only."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.always: frozenset[int] = frozenset()
        """Steps that are kept in any case."""
        self._seen = 0
        self._last: deque[CandidateStep] = deque(maxlen=LAST)
        self._slowest: list[CandidateStep] = []
        self._written_at = 0.0

    def add(self, number: int, seconds: float, make: MakeEvents, now: float) -> None:
        """Offer a step. `make` is called now, later, or never."""
        step = CandidateStep(number, seconds, [make])
        self._seen += 1
        self._last.append(step)
        wanted = self._seen <= FIRST or number in self.always
        if wanted or now - self._written_at >= EVERY:
            self._write(step)
            self._written_at = now
        if len(self._slowest) < SLOWEST or seconds > self._slowest[-1].seconds:
            self._add_slow(step)

    def follow(self, make: MakeEvents) -> None:
        """Add a sweep that ran outside a step: it is kept if the step before it is kept."""
        step = self._last[-1] if self._last else None
        if step is None or step.written:
            self._write_events(make())
        else:
            step.make_events.append(make)
        if step is not None and step in self._slowest:
            step.lines += map(line_of, make())
            self._write_slowest()

    def close(self) -> None:
        """Write the last steps."""
        for step in self._last:
            if not step.written:
                self._write(step)
        self._last.clear()

    def _write(self, step: CandidateStep) -> None:
        for make in step.make_events:
            self._write_events(make())
        step.written = True

    def _write_events(self, events: list[Event]) -> None:
        for event in events:
            self._folder.write(event)

    def _add_slow(self, step: CandidateStep) -> None:
        step.lines = [line_of(event) for make in step.make_events for event in make()]
        self._slowest.append(step)
        self._slowest.sort(key=lambda step: step.seconds, reverse=True)
        del self._slowest[SLOWEST:]
        self._write_slowest()

    def _write_slowest(self) -> None:
        self._folder.write_slowest("".join(line for step in self._slowest for line in step.lines))
