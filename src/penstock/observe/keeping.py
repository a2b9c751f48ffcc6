"""Which steps are kept in full: the first, the last, the slowest few, exact ones. Room: show.

What a step did is a thousand events and more, so a step is only turned into events when it is to
be kept: a long run costs no more for being long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.observe.lines import line_of
from penstock.observe.records import Event
from penstock.observe.writing import RunFolder

FIRST, LAST, SLOWEST = 3, 3, 3

EVERY = 5.0
"""Seconds after which the newest step is written anyway: a kill leaves no time for the last ones"""

Make = Callable[[], list[Event]]


@dataclass(slots=True)
class Step:
    """A step that may be kept."""

    number: int
    seconds: float
    make: Make
    written: bool = False


class Keeper:
    """For one thread."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.always: frozenset[int] = frozenset()
        """Steps that are kept whatever they took."""
        self._seen = 0
        self._last: deque[Step] = deque(maxlen=LAST)
        self._slowest: list[tuple[float, int, str]] = []
        self._written_at = 0.0

    def add(self, number: int, seconds: float, make: Make, now: float) -> None:
        """`make` is called now, later or never."""
        step = Step(number, seconds, make)
        self._seen += 1
        self._last.append(step)
        wanted = self._seen <= FIRST or number in self.always
        if wanted or now - self._written_at >= EVERY:
            self._write(step)
            self._written_at = now
        if len(self._slowest) < SLOWEST or seconds > self._slowest[-1][0]:
            self._keep_slow(step)

    def close(self) -> None:
        for step in self._last:
            if not step.written:
                self._write(step)
        self._last.clear()

    def _write(self, step: Step) -> None:
        for event in step.make():
            self._folder.write(event)
        step.written = True

    def _keep_slow(self, step: Step) -> None:
        text = "".join(line_of(event) for event in step.make())
        self._slowest.append((step.seconds, step.number, text))
        self._slowest.sort(reverse=True)
        del self._slowest[SLOWEST:]
        self._folder.write_slowest("".join(text for _, _, text in self._slowest))
