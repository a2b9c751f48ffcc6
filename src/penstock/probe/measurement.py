"""Turn timed runs into figures, and count the figures of a probe.

This module knows no hardware: what it times is an argument.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.machine.machine import Figure

T = TypeVar("T")

OnProgress = Callable[[int, int, str], None]
"""Called with the number of figures done, the total, and the current figure."""

Run = Callable[[int], float]
"""Performs an amount of work (bytes to move, hops to make) and returns the seconds it took."""

_TICK = 1e-9
"""Shortest duration that is recorded, so that a rate is always finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Time and memory that a probe may use."""

    slice_seconds: float
    """Time for one figure. It takes longer if even the smallest runs are too slow."""

    host_bytes: int
    """Maximum memory in use at a time. A quarter of the available memory is a second limit."""

    min_samples: int = 3
    """Minimum number of samples of a figure."""

    max_samples: int = 15
    """Maximum number of samples of a figure."""

    @property
    def min_runs(self) -> int:
        """Minimum number of runs of a given length: one trial, one warm-up and the samples."""
        return self.min_samples + 2

    @property
    def run_seconds(self) -> float:
        """Time for one run: the slice divided by a warm-up and the minimum number of samples."""
        return self.slice_seconds / (self.min_samples + 1)

    @property
    def setup_seconds(self) -> float:
        """Time to allocate the pages of a buffer, or the blocks of a file, before measuring."""
        return 3 * self.slice_seconds


def figure(samples: Sequence[float]) -> Figure:
    """Summarize samples as a figure."""
    return Figure(
        median=statistics.median(samples),
        low=min(samples),
        high=max(samples),
        samples=len(samples),
    )


def measure_rate(run: Run, effort: Effort, *, unit: int, limit: int) -> Figure:
    """Measure the work done per second."""
    count, seconds = collect_samples(run, effort, unit=unit, limit=limit)
    return figure([count / s for s in seconds])


def measure_time(run: Run, effort: Effort, *, unit: int, limit: int) -> Figure:
    """Measure the seconds for one unit of work."""
    count, seconds = collect_samples(run, effort, unit=unit, limit=limit)
    return figure([s / count for s in seconds])


def collect_samples(run: Run, effort: Effort, *, unit: int, limit: int) -> tuple[int, list[float]]:
    """Return the amount of work of a run, and the duration of each sample.

    The runs that choose the amount, and the first run of that amount, warm up caches, page tables
    and devices. They are not counted.
    """
    count = choose_amount(run, effort, unit=unit, limit=limit)
    run(count)
    seconds: list[float] = []
    while len(seconds) < effort.min_samples or (
        sum(seconds) < effort.slice_seconds and len(seconds) < effort.max_samples
    ):
        seconds.append(max(run(count), _TICK))
    return count, seconds


def choose_amount(run: Run, effort: Effort, *, unit: int, limit: int) -> int:
    """Return the multiple of `unit`, up to `limit`, whose run takes about `effort.run_seconds`."""
    limit = max(unit, limit // unit * unit)
    count = unit
    while True:
        seconds = max(run(count), _TICK)
        target = max(unit, int(count * effort.run_seconds / seconds) // unit * unit)
        if target <= 2 * count or count == limit:
            return min(target, limit)
        # A short run says little about a long one, so increase the amount in steps.
        count = min(target, 8 * count, limit)


class Progress:
    """Counts measured figures. A figure that cannot be measured becomes a note."""

    def __init__(self, total: int, on_progress: OnProgress | None = None) -> None:
        self.total = total
        self.done = 0
        self.notes: list[str] = []
        self._on_progress = on_progress

    def measure(self, what: str, step: Callable[[], T]) -> T | None:
        """Measure one figure. On failure, add a note and return None."""
        self.report(what)
        result = self.attempt(what, step)
        self.done += 1
        return result

    def attempt(self, what: str, step: Callable[[], T], *, figures: int = 0) -> T | None:
        """Run a step that `figures` figures depend on. On failure, skip them all with a note."""
        try:
            return step()
        # torch reports a lack of memory as a RuntimeError.
        except (PenstockError, OSError, MemoryError, RuntimeError) as error:
            self.notes.append(f"{what}: not measured: {error}")
            self.done += figures
            return None

    def report(self, what: str) -> None:
        """Report the current figure."""
        if self._on_progress is not None:
            self._on_progress(self.done, self.total, what)
