"""Quantities that were sampled over time (memory, traffic, load), and the peaks of memory."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.observe.records import GpuSample, RecordedRun, Sample
from penstock.observe.steps import Segment, Step

Point = tuple[float, float]
"""Time in seconds, and value."""

GAP = 12
"""Number of sampling intervals without a sample after which a line is interrupted."""

GPU_MEMORY = ("allocated", "reserved", "used")
GPU_LINKS = ("h2d", "d2h")

FOLLOWS_HOST = (".allocated", ".reserved", ".pinned")
"""Series of torch's allocators. They change when the host allocates, not when the GPU executes."""

TIER_ORDER = ("hbm", "dram", "cxl", "nvme")


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time, in order of time."""

    key: str
    """Such as gpu0.allocated, host.rss, node0, tier.hbm, h2d, disk:vda:read, cpu."""

    points: tuple[Point, ...]
    host_phases: tuple[str | None, ...] = ()
    """The host's phase at each point, for a quantity that follows the host: the host allocates for
    one phase while the GPU still executes the phase before."""

    def between(self, start: float, end: float) -> tuple[Point, ...]:
        """Return the points of a time window, excluding its end, which the next window has."""
        low = bisect.bisect_left(self.points, (start, -math.inf))
        high = bisect.bisect_left(self.points, (end, -math.inf))
        return self.points[low:high]

    def around(self, start: float, end: float) -> tuple[Point, ...]:
        """Return the same and one more point on each side, so a line reaches the window's edges."""
        low = bisect.bisect_left(self.points, (start, -math.inf))
        high = bisect.bisect_left(self.points, (end, -math.inf))
        return self.points[max(0, low - 1) : high + 1]

    @property
    def highest(self) -> int:
        """Index of the highest point, or of the first if there are several."""
        return max(range(len(self.points)), key=lambda at: self.points[at][1])


@dataclass(frozen=True, slots=True)
class Stat:
    """Statistics of a quantity in one phase."""

    count: int
    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest use of one memory over the whole run."""

    key: str
    """Key of the series: gpu0.allocated, host.rss, node0, tier.hbm."""

    measured: int | None
    """None if it was planned but not sampled."""

    planned: int | None = None
    budget: int | None = None
    capacity: int | None = None
    step: int | None = None
    phase: str | None = None
    """Phase in which the peak was first reached; without a step, a description of when."""


# Series.


def memory_series(run: RecordedRun) -> dict[str, Series]:
    """Return the bytes in use on GPUs, on the host and its nodes, and in Penstock's tiers."""
    found = {}
    for index in range(_gpu_count(run)):
        for name in GPU_MEMORY:
            found[f"gpu{index}.{name}"] = _points(run, _gpu_value(index, name))
    found["host.rss"] = _points(run, lambda sample: sample.host.rss)
    found["host.pinned"] = _pinned_points(run)
    found["host.available"] = _points(run, lambda sample: sample.host.available)
    for node in _keys(sample.host.nodes for sample in run.samples):
        found[f"node{node}"] = _points(run, _node_value(node))
    for tier in _keys(sample.tiers for sample in run.samples):
        found[f"tier.{tier}"] = _points(run, _tier_value(tier))
    return {key: _with_host_phases(run, key, points) for key, points in found.items() if points}


def traffic_series(run: RecordedRun) -> dict[str, Series]:
    """Return the sampled bytes per second of each link."""
    found = {}
    for index in range(_gpu_count(run)):
        for name in GPU_LINKS:
            key = name if index == 0 else f"{name} gpu{index}"
            found[key] = _points(run, _gpu_value(index, name))
    for disk in _keys(sample.disk for sample in run.samples):
        for at, way in enumerate(("read", "write")):
            found[f"disk:{disk}:{way}"] = _rates(_points(run, _disk_value(disk, at)))
    return {key: Series(key, points) for key, points in found.items() if points}


def load_series(run: RecordedRun) -> dict[str, Series]:
    """Return the load of each GPU, and the mean load of the CPU cores, from 0 to 1."""
    found = {
        f"gpu{index}.utilisation": _points(run, _gpu_value(index, "utilisation"))
        for index in range(_gpu_count(run))
    }
    found["cpu"] = _points(run, lambda s: math.fsum(s.cpu) / len(s.cpu) if s.cpu else None)
    return {key: Series(key, points) for key, points in found.items() if points}


def _with_host_phases(run: RecordedRun, key: str, points: tuple[Point, ...]) -> Series:
    if not key.endswith(FOLLOWS_HOST):
        return Series(key, points)
    phases = {sample.t: sample.phase for sample in run.samples}
    return Series(key, points, tuple(phases[t] for t, _ in points))


def _points(run: RecordedRun, get: Callable[[Sample], float | None]) -> tuple[Point, ...]:
    values = ((sample.t, get(sample)) for sample in run.samples)
    # A file can contain NaN, which would spoil every sum and scale.
    return tuple((t, v) for t, v in values if v is not None and math.isfinite(t + v))


def _pinned_points(run: RecordedRun) -> tuple[Point, ...]:
    """Leave out samples without tiers in a Penstock run: they lack the engine's pinned memory."""
    has_engine = any(sample.tiers for sample in run.samples)
    return _points(run, lambda s: s.host.pinned if s.tiers or not has_engine else None)


def _gpu_value(index: int, name: str) -> Callable[[Sample], float | None]:
    def get(sample: Sample) -> float | None:
        gpu = sample.gpu[index] if index < len(sample.gpu) else GpuSample()
        value: float | None = getattr(gpu, name)
        return value

    return get


def _node_value(node: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.host.nodes.get(node)


def _tier_value(tier: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.tiers.get(tier)


def _disk_value(disk: str, at: int) -> Callable[[Sample], float | None]:
    return lambda sample: sample.disk[disk][at] if disk in sample.disk else None


def _gpu_count(run: RecordedRun) -> int:
    return max((len(sample.gpu) for sample in run.samples), default=0)


def _keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return sorted({key for mapping in mappings for key in mapping})


def _rates(totals: Sequence[Point]) -> tuple[Point, ...]:
    """Convert running totals to rates, each at the end of its interval. A counter that went
    backwards counts as no traffic."""
    found = []
    for (before, low), (t, high) in itertools.pairwise(totals):
        if t > before:
            found.append((t, max(0.0, high - low) / (t - before)))
    return tuple(found)


def stats_by_phase(
    points: Sequence[Point], segments: Sequence[Segment], host_phases: Sequence[str | None] = ()
) -> dict[str, Stat]:
    """Return the lowest, mean and highest value in each phase, in order of the phases.

    Segments must be sorted by start. A point's host phase takes precedence over the phase at its
    time.
    """
    starts = [segment.start for segment in segments]
    values: dict[str, list[float]] = {segment.name: [] for segment in segments}
    for (t, value), phase in itertools.zip_longest(points, host_phases[: len(points)]):
        at = bisect.bisect_right(starts, t) - 1
        if at >= 0 and t < segments[at].end:
            values.setdefault(phase or segments[at].name, []).append(value)
    return {
        name: Stat(len(v), min(v), math.fsum(v) / len(v), max(v)) for name, v in values.items() if v
    }


def thin(points: Sequence[Point], buckets: int) -> tuple[Point, ...]:
    """Reduce points to at most four per bucket of time: first, lowest, highest and last."""
    if len(points) <= 4 * buckets:
        return tuple(points)
    start, end = points[0][0], points[-1][0]
    width = (end - start) / buckets or 1.0
    by_bucket: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        by_bucket[min(buckets - 1, int((point[0] - start) / width))].append(point)
    kept: list[Point] = []
    for _, group in sorted(by_bucket.items()):
        low, high = (pick(group, key=lambda p: p[1]) for pick in (min, max))
        kept += sorted({group[0], low, high, group[-1]})
    return tuple(kept)


def split_at_gaps(points: Sequence[Point], interval: float) -> list[list[Point]]:
    """Split points where samples are missing, so that no line is drawn across a gap."""
    longest = GAP * interval
    parts: list[list[Point]] = []
    for point in points:
        if parts and point[0] - parts[-1][-1][0] <= longest:
            parts[-1].append(point)
        else:
            parts.append([point])
    return parts


# Peaks.


def find_peaks(
    run: RecordedRun, memory: Mapping[str, Series], steps: Sequence[Step]
) -> tuple[Peak, ...]:
    """Return the peak of each memory: tiers first, then GPUs, the host and its nodes."""
    planned = run.observation.planned
    tiers = planned.tiers if planned is not None else {}
    sources = {"tier.hbm": "gpu0.allocated"} if tensors_are_hbm_tier(run, memory) else {}
    found = []
    for key in _tier_keys(memory, tiers):
        tier = tiers.get(key.removeprefix("tier."))
        if tier is not None and not tier.peak and not tier.budget and key not in memory:
            continue
        peak = _peak(
            sources.get(key, key), memory, steps,
            planned=tier.peak if tier else None,
            budget=tier.budget if tier else None,
        )  # fmt: skip
        found.append(replace(peak, key=key))
    others = [key for key in memory if not key.startswith("tier.") and key != "host.available"]
    wholes = {"host.rss": planned.host if planned is not None else None}
    sampled = (
        _peak(key, memory, steps, planned=wholes.get(key), capacity=_capacity(run, key))
        for key in others
    )
    found += [_peak_between_samples(run, peak, steps) for peak in sampled]
    return tuple(found)


def tensors_are_hbm_tier(run: RecordedRun, memory: Mapping[str, Series]) -> bool:
    """Whether the GPU's tensors stand for what the HBM tier holds: in recordings of old versions.

    Their samples have either the tensors of the HBM tier or what torch reserved, but never the CUDA
    context, which is part of the plan.
    """
    planned, gpus = run.observation.planned, run.observation.hardware.gpus
    is_old = planned is not None and planned.host is None
    return is_old and len(gpus) == 1 and "gpu0.allocated" in memory


def _peak_between_samples(run: RecordedRun, peak: Peak, steps: Sequence[Step]) -> Peak:
    """Use torch's own peak if it is higher: samples can miss a peak between them."""
    match = re.fullmatch(r"gpu(\d+)\.allocated", peak.key)
    if match is None:
        return peak
    index = int(match[1])
    # The time is negated so that `max` finds the first sample that knew the highest peak.
    known = [(s.gpu[index].peak or 0, -s.t) for s in run.samples if index < len(s.gpu)]
    highest, negated_time = max(known, default=(0, 0.0))
    if highest <= (peak.measured or 0):
        return peak
    step, phase = _find_moment(-negated_time, steps)
    when = phase if step is None else f"step {step}, between samples"
    return replace(peak, measured=highest, step=None, phase=when)


def _tier_keys(memory: Mapping[str, Series], tiers: Mapping[str, object]) -> list[str]:
    names = {key.removeprefix("tier.") for key in memory if key.startswith("tier.")} | set(tiers)
    rank = {name: at for at, name in enumerate(TIER_ORDER)}
    return [f"tier.{n}" for n in sorted(names, key=lambda n: (rank.get(n, len(TIER_ORDER)), n))]


def _peak(
    key: str,
    memory: Mapping[str, Series],
    steps: Sequence[Step],
    *,
    planned: int | None = None,
    budget: int | None = None,
    capacity: int | None = None,
) -> Peak:
    if key not in memory:
        return Peak(key, None, planned, budget, capacity)
    series = memory[key]
    t, value = series.points[series.highest]
    step, phase = _find_moment(t, steps)
    if step is not None and series.host_phases:
        phase = series.host_phases[series.highest] or phase
    return Peak(key, int(value), planned, budget, capacity, step, phase)


def _find_moment(t: float, steps: Sequence[Step]) -> tuple[int | None, str | None]:
    """Return the step and phase at a time; outside steps, None and a description."""
    at = bisect.bisect_right([step.start for step in steps], t) - 1
    if at < 0:
        return None, "before the first phase" if steps else None
    if t > steps[at].end:
        return None, "outside steps"
    inside = (s.name for s in steps[at].segments if s.start <= t < s.end)
    return steps[at].number, next(inside, None)


def _capacity(run: RecordedRun, key: str) -> int | None:
    """Return the size of a memory, if the hardware reports it."""
    hardware = run.observation.hardware
    if key.startswith("gpu"):
        index = int(key.removeprefix("gpu").split(".")[0])
        return next((gpu.nbytes for gpu in hardware.gpus if gpu.index == index), None)
    if key.startswith("node"):
        node = key.removeprefix("node")
        return next((info.nbytes for info in hardware.nodes if str(info.id) == node), None)
    sizes = [info.nbytes for info in hardware.nodes]
    known = [nbytes for nbytes in sizes if nbytes is not None]
    return sum(known) if known and len(known) == len(sizes) else None
