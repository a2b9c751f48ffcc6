"""From timed runs to a figure. Room: measure. Knows no hardware: what it times is an argument."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.machine.machine import Figure

Run = Callable[[int], float]
"""Does so much work once (bytes moved, hops made) and says how many seconds it took."""

_TICK = 1e-9
"""No run counts as shorter, so that a rate is always finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time and memory a probe may take."""

    slice_seconds: float
    """For one figure. Where even the smallest runs are too slow for it, it takes longer."""

    host_bytes: int
    """The most memory held at once; never more than a quarter of what is available either."""

    samples_least: int = 3
    samples_most: int = 15

    @property
    def runs_least(self) -> int:
        """Of a figure whose length is given: one looks at it, one warms up, the rest count."""
        return self.samples_least + 2

    @property
    def run_seconds(self) -> float:
        """For one run: the slice, shared by a warm-up and the fewest samples."""
        return self.slice_seconds / (self.samples_least + 1)

    @property
    def setup_seconds(self) -> float:
        """For giving a buffer its pages, or a file its blocks, before it is measured."""
        return 3 * self.slice_seconds


def figure(samples: Sequence[float]) -> Figure:
    """The middle of the samples, their extremes, and how many there were."""
    return Figure(
        median=statistics.median(samples),
        low=min(samples),
        high=max(samples),
        samples=len(samples),
    )


def take_rate(run: Run, effort: Effort, *, unit: int, most: int) -> Figure:
    """Work per second."""
    count, seconds = take_samples(run, effort, unit=unit, most=most)
    return figure([count / s for s in seconds])


def take_time(run: Run, effort: Effort, *, unit: int, most: int) -> Figure:
    """Seconds for one piece of work."""
    count, seconds = take_samples(run, effort, unit=unit, most=most)
    return figure([s / count for s in seconds])


def take_samples(run: Run, effort: Effort, *, unit: int, most: int) -> tuple[int, list[float]]:
    """How much work a run was given, and the seconds of each.

    The runs that find the amount, and the first run of that amount, warm up caches, page tables and
    devices: they are never counted.
    """
    count = settle(run, effort, unit=unit, most=most)
    run(count)
    seconds: list[float] = []
    while len(seconds) < effort.samples_least or (
        sum(seconds) < effort.slice_seconds and len(seconds) < effort.samples_most
    ):
        seconds.append(max(run(count), _TICK))
    return count, seconds


def settle(run: Run, effort: Effort, *, unit: int, most: int) -> int:
    """The multiple of `unit` up to `most` whose run takes about its part of the slice."""
    most = max(unit, most // unit * unit)
    count = unit
    while True:
        seconds = max(run(count), _TICK)
        wanted = max(unit, int(count * effort.run_seconds / seconds) // unit * unit)
        if wanted <= 2 * count or count == most:
            return min(wanted, most)
        # A short run says little about a long one, so it grows by steps.
        count = min(wanted, 8 * count, most)


# --------
# How far a probe is, and what it had to leave out. Room: measure.

T = TypeVar("T")

OnProgress = Callable[[int, int, str], None]
"""Called with figures done, figures in all, and what is being measured now."""


class Progress:
    """Counts figures as they are taken. One that cannot be taken becomes a note, not an end."""

    def __init__(self, total: int, on_progress: OnProgress | None = None) -> None:
        self.total = total
        self.done = 0
        self.notes: list[str] = []
        self._on_progress = on_progress

    def take(self, what: str, measure: Callable[[], T]) -> T | None:
        """One figure, or None and a note."""
        self.say(what)
        result = self.attempt(what, measure)
        self.done += 1
        return result

    def attempt(self, what: str, step: Callable[[], T], *, figures: int = 0) -> T | None:
        """A step on the way to so many figures; if it fails they are all given up, with a note."""
        try:
            return step()
        # What the machine refuses: memory, files, and RuntimeError, which is how torch says it.
        except (PenstockError, OSError, MemoryError, RuntimeError) as refused:
            self.notes.append(f"{what}: not measured: {refused}")
            self.done += figures
            return None

    def say(self, what: str) -> None:
        if self._on_progress is not None:
            self._on_progress(self.done, self.total, what)
