"""What bench_storage measured, and what is said of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from fio import WAYS


@dataclass
class Row:
    """Samples of one setting, ours and fio's taken in turns."""

    target: str
    engine: str
    pattern: str
    request_nbytes: int
    depth: int
    ours: list[float] = field(default_factory=list)
    verified: list[float] = field(default_factory=list)
    verified_cpu: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    fio: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """By the way that fio does it."""
    deepspeed: list[float] = field(default_factory=list)
    """Of its aio handle, where it is there."""
    fio_cpu: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    @property
    def best_way(self) -> str:
        return max(WAYS, key=lambda way: statistics.median(self.fio[way]))

    @property
    def verify_cost(self) -> float:
        return 1 - statistics.median(self.verified) / statistics.median(self.ours)


@dataclass
class Memory:
    """What a target's passes left behind in memory."""

    target: str
    cached_nbytes: int
    """Of the file, in the page cache."""
    grown_nbytes: int
    """Of the process, beyond the arenas: from before the first pass to after the last."""


def typical(settings: list[list[float]]) -> float:
    """The rate of the best setting. Chosen by every second sample, told by the others, and the
    other way round: the highest of several noisy medians is higher than any of them truly is."""
    halves = []
    for chosen_by in (0, 1):
        best_one = max(settings, key=lambda samples: statistics.median(samples[chosen_by::2]))
        halves.append(statistics.median(best_one[1 - chosen_by :: 2]))
    return statistics.fmean(halves)


def spread(samples: list[float]) -> str:
    middle = statistics.median(samples) / 1e9
    return f"{middle:5.2f} ({min(samples) / 1e9:.2f}-{max(samples) / 1e9:.2f})"


def percentiles(row: Row) -> dict[str, list[float]]:
    """10, 50 and 90 of each list of rates."""
    lists = {"ours": row.ours, "verified": row.verified, **row.fio}
    return {
        name: [sorted(rates)[round(p * (len(rates) - 1))] for p in (0.1, 0.5, 0.9)]
        for name, rates in lists.items()
    }
