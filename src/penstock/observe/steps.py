"""The steps of a run, and the phases in them. Room: show.

A step lasts until the next one begins: what happens in between (loading data, logging) is part of
what a step takes. Evaluating and saving are not: a step ends where they begin. Nor is what an
engine of Penstock's own sweeps apart, before a save or at the end: its steps sweep in their
forward, each what the one before has left.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.observe.intervals import Interval, union
from penstock.observe.records import OBSERVING, Event, Phase, RecordedRun

OUTSIDE = ("evaluate", "save", OBSERVING)
"""Phases that belong to no step."""

UPDATE = "update"
UNNAMED = "between phases"
"""Time of a step that no phase claims."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch in which one phase went on. Segments do not overlap."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    number: int
    start: float
    end: float
    segments: tuple[Segment, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def during(self, name: str) -> list[Interval]:
        """When the phase went on; with UNNAMED, when none did."""
        return union((s.start, s.end) for s in self.segments if s.name == name)


def steps_of(run: RecordedRun) -> tuple[Step, ...]:
    """Every step, by its start: from phases or, where none has a step, from events or samples."""
    spans = _spans(run)
    starts = sorted((start, number) for number, (start, _) in spans.items())
    names = _outside(run, len(spans))
    outside = sorted(p.start for p in run.phases if p.name in names)
    phases = _Phases(run.phases)
    found = []
    for at, (start, number) in enumerate(starts):
        last = spans[number][1]
        # A step that was not kept leaves a hole, which is not this step's time.
        follows = at + 1 < len(starts) and starts[at + 1][1] == number + 1
        end = starts[at + 1][0] if follows else last
        # What the GPU still does of this step may reach into the next one.
        cut = bisect.bisect_left(outside, start)
        if cut < len(outside) and outside[cut] < end:
            end = outside[cut]
        if end > start:
            found.append(Step(number, start, end, phases.between(start, end)))
    return tuple(found)


def _outside(run: RecordedRun, steps: int) -> tuple[str, ...]:
    """Phases that belong to no step of this run."""
    if run.observation.planned is None:
        return OUTSIDE
    swept = {phase.step for phase in run.phases if phase.name == UPDATE}
    return (*OUTSIDE, UPDATE) if 2 * len(swept) < steps else OUTSIDE


def _spans(run: RecordedRun) -> dict[int, Interval]:
    """First and last moment of each step."""
    inside = [p for p in run.phases if p.step is not None and p.name not in OUTSIDE]
    marks: Iterable[tuple[int | None, float, float]]
    if inside:
        marks = ((p.step, p.start, p.end) for p in inside)
    elif any(event.step is not None for event in run.events):
        marks = ((e.step, e.start, e.end) for e in run.events)
    else:
        marks = ((s.step, s.t, s.t) for s in run.samples)
    found: dict[int, Interval] = {}
    for number, start, end in marks:
        if number is None or not (math.isfinite(start) and math.isfinite(end)):
            continue
        first, last = found.get(number, (start, end))
        found[number] = (min(first, start), max(last, end))
    return found


class _Phases:
    """Phases by time. They may nest or, in threads, overlap: the one begun last has the moment."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self.segments = flatten(phases)
        self.starts = [segment.start for segment in self.segments]

    def between(self, start: float, end: float) -> tuple[Segment, ...]:
        """Segments that cover all of the time, with UNNAMED between those that have a name."""
        at = max(0, bisect.bisect_right(self.starts, start) - 1)
        found, reached = [], start
        for segment in itertools.islice(self.segments, at, None):
            if segment.start >= end:
                break
            first, last = max(segment.start, start), min(segment.end, end)
            if last <= first:
                continue
            if first > reached:
                found.append(Segment(UNNAMED, reached, first))
            found.append(Segment(segment.name, first, last))
            reached = last
        if reached < end:
            found.append(Segment(UNNAMED, reached, end))
        return tuple(found)


def segments_between(phases: Iterable[Phase], start: float, end: float) -> tuple[Segment, ...]:
    """The phases of any window of time, as segments that cover all of it."""
    return _Phases(phases).between(start, end)


def flatten(phases: Iterable[Phase]) -> list[Segment]:
    """Phases that may overlap as segments that do not: the one begun last has the moment."""
    real = sorted(
        (p for p in phases if math.isfinite(p.start) and math.isfinite(p.end) and p.end > p.start),
        key=lambda p: p.start,
    )
    edges = sorted({edge for p in real for edge in (p.start, p.end)})
    found: list[Segment] = []
    open_: list[tuple[float, float, str]] = []
    coming = 0
    for start, end in itertools.pairwise(edges):
        while coming < len(real) and real[coming].start <= start:
            heapq.heappush(open_, (-real[coming].start, real[coming].end, real[coming].name))
            coming += 1
        while open_ and open_[0][1] <= start:
            heapq.heappop(open_)
        if not open_:
            continue
        name = open_[0][2]
        if found and found[-1].name == name and found[-1].end == start:
            found[-1] = Segment(name, found[-1].start, end)
        else:
            found.append(Segment(name, start, end))
    return found


def settled(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Without the first, which warms up, where there are enough others."""
    return tuple(steps[1:] if len(steps) >= 3 else steps)


def typical(steps: Sequence[Step]) -> Step | None:
    """The step whose time is nearest to the median of those that have settled."""
    steps = settled(steps)
    if not steps:
        return None
    middle = statistics.median(step.seconds for step in steps)
    return min(steps, key=lambda step: (abs(step.seconds - middle), step.start))


def phase_seconds(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds of a step that each phase takes, on average, by when they first come."""
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for segment in step.segments:
            total[segment.name] += segment.end - segment.start
    return {name: seconds / len(steps) for name, seconds in total.items()}


def recorded(steps: Sequence[Step], events: Sequence[Event]) -> tuple[Step, ...]:
    """The steps whose events were kept."""
    numbers = {event.step for event in events if event.step is not None}
    if numbers:
        return tuple(step for step in steps if step.number in numbers)
    busy = union((event.start, event.end) for event in events)
    starts = [start for start, _ in busy]
    kept = []
    for step in steps:
        at = bisect.bisect_left(starts, step.end) - 1
        if at >= 0 and busy[at][1] > step.start:
            kept.append(step)
    return tuple(kept)
