"""Which stretch of time a plot shows, and which points lie in it. Room: show."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.measures import Measures
from penstock.observe.series import Point, Series
from penstock.observe.steps import Segment, Step, segments_between, settled

FEW = 12
"""Samples in a window, below which it is widened: a line needs points."""

ENOUGH = 40

WHOLE = 30
"""Points of GPU memory that make a picture of an iteration: it rises and falls within moments."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that a plot shows."""

    start: float
    end: float
    title: str
    segments: tuple[Segment, ...]
    laid: tuple[Step, ...] = ()
    """Steps whose points are laid over each other here: one has too few."""

    @property
    def note(self) -> str:
        """What a reader must know of it."""
        if not self.laid:
            return ""
        return f"Samples of {len(self.laid)} steps, laid over each other phase by phase."


def shown_window(m: Measures) -> Window | None:
    """The shown step; all of the run where no step is known."""
    if m.shown is None:
        return whole_window(m)
    return _window(m, m.shown, m.shown)


def laid_window(m: Measures, window: Window, keys: Sequence[str]) -> Window:
    """The same with the points of all settled steps, where those of one are too few."""
    points = max(len(m.memory[key].between(window.start, window.end)) for key in keys)
    steps = settled(m.steps)
    if m.shown not in steps or len(steps) < 2 or points >= WHOLE:
        return window
    return replace(window, laid=steps)


def wide_window(m: Measures) -> Window | None:
    """The shown step or, where samples are too few for it, as many steps around it as it takes.
    Only steps that follow each other: what lies between others is none of theirs."""
    one = shown_window(m)
    if one is None or m.shown is None or not m.run.samples or _count(m, one) >= FEW:
        return one
    steps = m.steps if m.shown not in settled(m.steps) else settled(m.steps)
    first = last = steps.index(m.shown)
    while _count(m, _window(m, steps[first], steps[last])) < ENOUGH:
        before = first - (first > 0 and steps[first - 1].end == steps[first].start)
        after = last + (last + 1 < len(steps) and steps[last].end == steps[last + 1].start)
        if (before, after) == (first, last):
            break
        first, last = before, after
    return _window(m, steps[first], steps[last])


def whole_window(m: Measures) -> Window | None:
    """All of the run."""
    moments = [sample.t for sample in m.run.samples]
    moments += [t for event in m.run.events for t in (event.start, event.end)]
    moments = [t for t in moments if math.isfinite(t)]
    if not moments or max(moments) <= min(moments):
        return None
    start, end = min(moments), max(moments)
    return Window(start, end, "the whole run", segments_between(m.run.phases, start, end))


def _window(m: Measures, first: Step, last: Step) -> Window:
    title = f"step {first.number}"
    if last is not first:
        title = f"steps {first.number} to {last.number}"
    segments = segments_between(m.run.phases, first.start, last.end)
    return Window(first.start, last.end, title, segments)


def _count(m: Measures, window: Window) -> int:
    times = [sample.t for sample in m.run.samples]  # by time
    return bisect.bisect_left(times, window.end) - bisect.bisect_left(times, window.start)


def points_in(series: Series, window: Window) -> tuple[Point, ...]:
    """Of the window, and one more at either side; or of all the steps that are laid there."""
    if not window.laid:
        return series.around(window.start, window.end)
    places = _places(window.segments)
    found: list[Point] = []
    for step in window.laid:
        for key, segment in _places(step.segments).items():
            onto = places.get(key)
            if onto is None:
                continue
            scale = (onto.end - onto.start) / (segment.end - segment.start)
            found += [
                (onto.start + (t - segment.start) * scale, value)
                for t, value in series.between(segment.start, segment.end)
            ]
    return tuple(sorted(found))


def _places(segments: Sequence[Segment]) -> dict[tuple[str, int], Segment]:
    """By name, and by which of that name it is: steps may have several forwards."""
    seen: Counter[str] = Counter()
    found = {}
    for segment in segments:
        found[segment.name, seen[segment.name]] = segment
        seen[segment.name] += 1
    return found
