"""Find the steps of a run, and the phases in each step.

A step lasts until the next one begins, so it includes data loading and logging. Evaluation and
saving are not part of a step: a step ends where they begin. Neither is an optimizer sweep that a
Penstock engine runs outside its steps, before a save or at the end of a run; normally such an
engine runs the sweep of one step during the forward of the next.
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
from penstock.observe.records import DRIVER, OBSERVING, Event, Phase, RecordedRun

OUTSIDE = ("evaluate", "save", OBSERVING)
"""Phases that belong to no step."""

UPDATE = "update"
UNNAMED = "between phases"
"""Name of the segments of a step that no phase covers."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A time span with one phase. Segments do not overlap."""

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
        """Return the intervals of a phase, or with UNNAMED those without any phase."""
        return union((s.start, s.end) for s in self.segments if s.name == name)


def find_steps(run: RecordedRun) -> tuple[Step, ...]:
    """Return all steps in order: from phases or, if no phase has a step, from events or samples."""
    spans = _spans(run)
    starts = sorted((start, number) for number, (start, _) in spans.items())
    outside_names = _outside(run, len(spans))
    outside = sorted(p.start for p in run.phases if p.name in outside_names)
    timeline = PhaseTimeline(run.phases)
    found = []
    for at, (start, number) in enumerate(starts):
        # If the next step was not kept, the gap after this step is not part of it.
        follows = at + 1 < len(starts) and starts[at + 1][1] == number + 1
        # The GPU may still be working on this step when the next one begins on the host; the time
        # after that belongs to the next step.
        end = starts[at + 1][0] if follows else spans[number][1]
        cut = bisect.bisect_left(outside, start)
        if cut < len(outside) and outside[cut] < end:
            end = outside[cut]
        if end > start:
            found.append(Step(number, start, end, timeline.between(start, end)))
    return tuple(found)


def _outside(run: RecordedRun, steps: int) -> tuple[str, ...]:
    """Return the phases that belong to no step of this run.

    In a Penstock run, updates are outside steps if fewer than half of the steps have one.
    """
    if run.observation.planned is None:
        return OUTSIDE
    updated = {phase.step for phase in run.phases if phase.name == UPDATE}
    return (*OUTSIDE, UPDATE) if 2 * len(updated) < steps else OUTSIDE


def _spans(run: RecordedRun) -> dict[int, Interval]:
    """Return the first and last recorded time of each step."""
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


class PhaseTimeline:
    """The phases of a run as segments, for lookup by time."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        self.segments = flatten_phases(phases)
        self.starts = [segment.start for segment in self.segments]

    def between(self, start: float, end: float) -> tuple[Segment, ...]:
        """Return segments that cover a time window without gaps; UNNAMED ones fill the gaps."""
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


def flatten_phases(phases: Iterable[Phase]) -> list[Segment]:
    """Turn phases, which may nest or overlap, into segments that do not: at any time, the phase
    that began last wins."""
    valid = sorted(
        (p for p in phases if math.isfinite(p.start) and math.isfinite(p.end) and p.end > p.start),
        key=lambda p: p.start,
    )
    edges = sorted({edge for p in valid for edge in (p.start, p.end)})
    found: list[Segment] = []
    open_phases: list[tuple[float, float, str]] = []  # a heap, latest start first
    upcoming = 0
    for start, end in itertools.pairwise(edges):
        while upcoming < len(valid) and valid[upcoming].start <= start:
            phase = valid[upcoming]
            heapq.heappush(open_phases, (-phase.start, phase.end, phase.name))
            upcoming += 1
        while open_phases and open_phases[0][1] <= start:
            heapq.heappop(open_phases)
        if not open_phases:
            continue
        name = open_phases[0][2]
        if found and found[-1].name == name and found[-1].end == start:
            found[-1] = Segment(name, found[-1].start, end)
        else:
            found.append(Segment(name, start, end))
    return found


def without_warmup(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Leave out the first step, which warms up, if there are at least two others."""
    return tuple(steps[1:] if len(steps) >= 3 else steps)


def profiled_steps(run: RecordedRun) -> frozenset[int]:
    """Return the numbers of the steps in which torch's profiler ran.

    A Penstock engine has events of other steps as well; only those of the driver come from the
    profiler.
    """
    if run.observation.mode != "exact":
        return frozenset()
    every = run.observation.planned is None
    return frozenset(
        event.step
        for event in run.events
        if event.step is not None and (every or event.track.startswith(DRIVER))
    )


def typical_step(steps: Sequence[Step]) -> Step | None:
    """Return the step whose time is closest to the median, without the warm-up step."""
    steps = without_warmup(steps)
    if not steps:
        return None
    median = statistics.median(step.seconds for step in steps)
    return min(steps, key=lambda step: (abs(step.seconds - median), step.start))


def phase_seconds(steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean seconds per step of each phase, in order of first occurrence."""
    total: dict[str, float] = defaultdict(float)
    for step in steps:
        for segment in step.segments:
            total[segment.name] += segment.end - segment.start
    return {name: seconds / len(steps) for name, seconds in total.items()}


def steps_with_events(steps: Sequence[Step], events: Sequence[Event]) -> tuple[Step, ...]:
    """Return the steps whose events were kept."""
    numbers = {event.step for event in events if event.step is not None}
    if numbers:
        return tuple(step for step in steps if step.number in numbers)
    busy = union((event.start, event.end) for event in events)
    starts = [start for start, _ in busy]
    found = []
    for step in steps:
        at = bisect.bisect_left(starts, step.end) - 1
        if at >= 0 and busy[at][1] > step.start:
            found.append(step)
    return tuple(found)
