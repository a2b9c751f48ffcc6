"""What the samples say, one quantity at a time. Room: show."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.observe.records import GpuSample, RecordedRun, Sample
from penstock.observe.steps import Segment

Point = tuple[float, float]

GAP = 12
"""Intervals without a sample after which a line is broken: samples were lost or let go of."""

GPU_MEMORY = ("allocated", "reserved", "used")
GPU_LINKS = ("h2d", "d2h")

FOLLOWS_HOST = (".allocated", ".reserved", ".pinned")
"""What torch's allocators hold changes when the host asks, not when the GPU gets there."""


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time: (seconds, value), by time."""

    key: str
    """Such as gpu0.allocated, host.rss, node0, tier.hbm, h2d, disk:vda:read, cpu."""

    points: tuple[Point, ...]
    told: tuple[str | None, ...] = ()
    """For each point the host's own phase, where the quantity follows the host: it allocates while
    the GPU is still in the phase before."""

    def between(self, start: float, end: float) -> tuple[Point, ...]:
        """Points of a window of time, its end not included: the next window has that one."""
        low = bisect.bisect_left(self.points, (start, -math.inf))
        high = bisect.bisect_left(self.points, (end, -math.inf))
        return self.points[low:high]

    def around(self, start: float, end: float) -> tuple[Point, ...]:
        """The same and one more at either side, so that a line reaches the window's edges."""
        low = bisect.bisect_left(self.points, (start, -math.inf))
        high = bisect.bisect_left(self.points, (end, -math.inf))
        return self.points[max(0, low - 1) : high + 1]

    @property
    def highest(self) -> int:
        """Which of the points is the highest, and the first that is."""
        return max(range(len(self.points)), key=lambda at: self.points[at][1])


@dataclass(frozen=True, slots=True)
class Stat:
    """A quantity in one phase."""

    count: int
    low: float
    mean: float
    high: float


def memory_series(run: RecordedRun) -> dict[str, Series]:
    """Bytes held: by the GPUs, the host, its nodes, and Penstock's tiers."""
    found = {}
    for index in range(_gpus(run)):
        for name in GPU_MEMORY:
            found[f"gpu{index}.{name}"] = _picked(run, _of_gpu(index, name))
    found["host.rss"] = _picked(run, lambda sample: sample.host.rss)
    found["host.pinned"] = _pinned(run)
    found["host.available"] = _picked(run, lambda sample: sample.host.available)
    for node in _keys(sample.host.nodes for sample in run.samples):
        found[f"node{node}"] = _picked(run, _of_node(node))
    for tier in _keys(sample.tiers for sample in run.samples):
        found[f"tier.{tier}"] = _picked(run, _of_tier(tier))
    return {key: _with_host(run, key, points) for key, points in found.items() if points}


def traffic_series(run: RecordedRun) -> dict[str, Series]:
    """Bytes a second that the samples saw on each link."""
    found = {}
    for index in range(_gpus(run)):
        for name in GPU_LINKS:
            key = name if index == 0 else f"{name} gpu{index}"
            found[key] = _picked(run, _of_gpu(index, name))
    for disk in _keys(sample.disk for sample in run.samples):
        for at, way in enumerate(("read", "write")):
            found[f"disk:{disk}:{way}"] = _rates(_picked(run, _of_disk(disk, at)))
    return {key: Series(key, points) for key, points in found.items() if points}


def load_series(run: RecordedRun) -> dict[str, Series]:
    """How busy processors were, 0 to 1: each GPU, and the CPU's cores on average."""
    found = {
        f"gpu{index}.utilisation": _picked(run, _of_gpu(index, "utilisation"))
        for index in range(_gpus(run))
    }
    found["cpu"] = _picked(run, lambda s: math.fsum(s.cpu) / len(s.cpu) if s.cpu else None)
    return {key: Series(key, points) for key, points in found.items() if points}


def _with_host(run: RecordedRun, key: str, points: tuple[Point, ...]) -> Series:
    if not key.endswith(FOLLOWS_HOST):
        return Series(key, points)
    phases = {sample.t: sample.phase for sample in run.samples}
    return Series(key, points, tuple(phases[t] for t, _ in points))


def _picked(run: RecordedRun, get: Callable[[Sample], float | None]) -> tuple[Point, ...]:
    values = ((sample.t, get(sample)) for sample in run.samples)
    # A file may say NaN, which would spoil every sum and scale.
    return tuple((t, v) for t, v in values if v is not None and math.isfinite(t + v))


def _pinned(run: RecordedRun) -> tuple[Point, ...]:
    """An engine's part of it is known while its tiers are."""
    engine = any(sample.tiers for sample in run.samples)
    return _picked(run, lambda s: s.host.pinned if s.tiers or not engine else None)


def _of_gpu(index: int, name: str) -> Callable[[Sample], float | None]:
    def get(sample: Sample) -> float | None:
        gpu = sample.gpu[index] if index < len(sample.gpu) else GpuSample()
        value: float | None = getattr(gpu, name)
        return value

    return get


def _of_node(node: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.host.nodes.get(node)


def _of_tier(tier: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.tiers.get(tier)


def _of_disk(disk: str, at: int) -> Callable[[Sample], float | None]:
    return lambda sample: sample.disk[disk][at] if disk in sample.disk else None


def _gpus(run: RecordedRun) -> int:
    return max((len(sample.gpu) for sample in run.samples), default=0)


def _keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return sorted({key for mapping in mappings for key in mapping})


def _rates(totals: Sequence[Point]) -> tuple[Point, ...]:
    """Running totals as rates, each at the end of its stretch. A counter that went back is not
    traffic."""
    found = []
    for (before, low), (t, high) in itertools.pairwise(totals):
        if t > before:
            found.append((t, max(0.0, high - low) / (t - before)))
    return tuple(found)


def by_phase(
    points: Sequence[Point], segments: Sequence[Segment], told: Sequence[str | None] = ()
) -> dict[str, Stat]:
    """Low, mean and high in each phase, by when the phases first come. Segments are by start; what
    a point was told to be in comes before what its time says."""
    starts = [segment.start for segment in segments]
    values: dict[str, list[float]] = {segment.name: [] for segment in segments}
    for (t, value), phase in itertools.zip_longest(points, told[: len(points)]):
        at = bisect.bisect_right(starts, t) - 1
        if at >= 0 and t < segments[at].end:
            values.setdefault(phase or segments[at].name, []).append(value)
    return {
        name: Stat(len(v), min(v), math.fsum(v) / len(v), max(v)) for name, v in values.items() if v
    }


def thinned(points: Sequence[Point], buckets: int) -> tuple[Point, ...]:
    """At most four points a bucket of time: first, lowest, highest, last. Extremes stay."""
    if len(points) <= 4 * buckets:
        return tuple(points)
    start, end = points[0][0], points[-1][0]
    width = (end - start) / buckets or 1.0
    held: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        held[min(buckets - 1, int((point[0] - start) / width))].append(point)
    kept: list[Point] = []
    for _, group in sorted(held.items()):
        low, high = (pick(group, key=lambda p: p[1]) for pick in (min, max))
        kept += sorted({group[0], low, high, group[-1]})
    return tuple(kept)


def unbroken(points: Sequence[Point], interval: float) -> list[list[Point]]:
    """Stretches without holes: no line is drawn over time that nobody sampled."""
    longest = GAP * interval
    found: list[list[Point]] = []
    for point in points:
        if found and point[0] - found[-1][-1][0] <= longest:
            found[-1].append(point)
        else:
            found.append([point])
    return found
