"""Which steps are kept in full: the first, the last, the slowest few, exact ones. Room: show.

What a step did is a thousand events and more, so a step is only turned into events when it is to
be kept: a long run costs no more for being long. What an engine sweeps apart is kept with the step
that left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.observe.lines import line_of
from penstock.observe.records import Event
from penstock.observe.writing import RunFolder

FIRST, LAST, SLOWEST = 3, 3, 3

EVERY = 5.0
"""Seconds after which the newest step is written anyway: a kill leaves no time for the last ones"""

Make = Callable[[], list[Event]]


@dataclass(slots=True, eq=False)
class Step:
    """A step that may be kept."""

    number: int
    seconds: float
    makes: list[Make]
    """What it did, and what followed it."""
    written: bool = False
    lines: list[str] = field(default_factory=list)
    """Its events, while it is among the slowest."""


class Keeper:
    """For one thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.always: frozenset[int] = frozenset()
        """Steps that are kept whatever they took."""
        self._seen = 0
        self._last: deque[Step] = deque(maxlen=LAST)
        self._slowest: list[Step] = []
        self._written_at = 0.0

    def add(self, number: int, seconds: float, make: Make, now: float) -> None:
        """`make` is called now, later or never."""
        step = Step(number, seconds, [make])
        self._seen += 1
        self._last.append(step)
        wanted = self._seen <= FIRST or number in self.always
        if wanted or now - self._written_at >= EVERY:
            self._write(step)
            self._written_at = now
        if len(self._slowest) < SLOWEST or seconds > self._slowest[-1].seconds:
            self._keep_slow(step)

    def follow(self, make: Make) -> None:
        """With what ran after the newest step: it is kept where that one is."""
        step = self._last[-1] if self._last else None
        if step is None or step.written:
            self._write_events(make())
        else:
            step.makes.append(make)
        if step is not None and step in self._slowest:
            step.lines += map(line_of, make())
            self._write_slowest()

    def close(self) -> None:
        for step in self._last:
            if not step.written:
                self._write(step)
        self._last.clear()

    def _write(self, step: Step) -> None:
        for make in step.makes:
            self._write_events(make())
        step.written = True

    def _write_events(self, events: list[Event]) -> None:
        for event in events:
            self._folder.write(event)

    def _keep_slow(self, step: Step) -> None:
        step.lines = [line_of(event) for make in step.makes for event in make()]
        self._slowest.append(step)
        self._slowest.sort(key=lambda step: step.seconds, reverse=True)
        del self._slowest[SLOWEST:]
        self._write_slowest()

    def _write_slowest(self) -> None:
        self._folder.write_slowest("".join(line for step in self._slowest for line in step.lines))
