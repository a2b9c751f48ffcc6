"""Which stretch of time a plot shows, and which points lie in it. Room: show."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.labels import link_title, memory_title, seconds_text, tidy
from penstock.observe.markup import colour_of
from penstock.observe.measures import Measures
from penstock.observe.peaks import holds_hbm
from penstock.observe.plots import Level, Line, Plot, line
from penstock.observe.records import Event
from penstock.observe.series import Point, Series, by_phase
from penstock.observe.steps import Segment, Step, segments_between, settled
from penstock.observe.usage import link_of

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


# --------
# Which plots a run's page has, and what is on each. Room: show.

BINS = 240
"""Stretches of the window over which a copy's bytes are spread."""

COLOUR_OF = {"allocated": 0, "reserved": 1, "used": 2, "rss": 0, "pinned": 1, "tier": 3}


def memory_plots(m: Measures, window: Window) -> list[Plot]:
    """Each GPU, the host, each tier that is neither, and the nodes."""
    groups: dict[str, list[str]] = {}
    for key in m.memory:
        if key != "host.available":
            groups.setdefault(_group(key, m), []).append(key)
    plots: list[Plot] = []
    for group, keys in groups.items():
        own = [key for key in keys if key != "tier.hbm" or not holds_hbm(m.run, m.memory)]
        # The host's memory changes from step to step, the GPU's within one.
        seen = laid_window(m, window, own) if own[0].startswith("gpu") else window
        lines = tuple(_memory_line(m, key, at, seen) for at, key in enumerate(own))
        lines = tuple(drawn for drawn in lines if drawn.points)
        if lines:
            plots.append(
                Plot(
                    id=f"memory-{len(plots)}", title=group, unit="bytes", lines=lines,
                    levels=_planned(m, keys, window), start=window.start, end=window.end,
                    segments=window.segments, interval=m.run.observation.interval,
                    note=seen.note,
                )
            )  # fmt: skip
    return plots


def _group(key: str, m: Measures) -> str:
    """A tier is drawn with the memory that it lies in, where that is one."""
    gpus = m.run.observation.hardware.gpus
    if key == "tier.hbm" and len(gpus) == 1:
        key = "gpu0.tier"
    if key == "tier.dram":
        key = "host.tier"
    if key.startswith("tier."):
        return memory_title(key)
    if key.startswith("node"):
        return "Memory nodes"
    owner = key.split(".")[0]
    return f"GPU {owner.removeprefix('gpu')} memory" if owner != "host" else "Host memory"


def _memory_line(m: Measures, key: str, at: int, window: Window) -> Line:
    series = m.memory[key]
    what = "tier" if key.startswith("tier.") else key.rpartition(".")[2]
    colour = COLOUR_OF.get(what, at)
    title = memory_title(key).split(", ")
    name = title[-1] if len(title) > 1 and not key.startswith("node") else title[0]
    return line(name, points_in(series, window), colour, m.stats(series))


def _planned(m: Measures, keys: Sequence[str], window: Window) -> tuple[Level, ...]:
    """Budget and planned peak of the tiers in a plot; the peak by phase where the plan has it."""
    planned = m.run.observation.planned
    if planned is None:
        return ()
    found = []
    for tier in (key.removeprefix("tier.") for key in keys if key.startswith("tier.")):
        said = planned.tiers.get(tier)
        if said is None:
            continue
        found.append(Level(f"budget of {tidy(tier)}", said.budget, "limit"))
        phases = {name: most[tier] for name, most in planned.phases.items() if tier in most}
        for name, most in phases.items():
            spans = tuple((s.start, s.end) for s in window.segments if s.name == name)
            if spans:
                found.append(Level(f"planned for {tidy(name)}", most, "planned", spans))
        if not phases:
            found.append(Level("planned peak", said.peak, "planned"))
    return tuple(found)


def traffic_plots(m: Measures, window: Window) -> list[Plot]:
    """Each link against its ceiling: from events where the window has any, else from samples."""
    plots: list[Plot] = []
    for link, use in m.links.items():
        if use.exact:
            moved = [e for e in m.run.events if e.link and link_of(e) == link]
            points = binned(moved, window.start, window.end)
            stats = by_phase(points, window.segments)
            note = ""
        else:
            series = m.traffic[link]
            points, stats = series.around(window.start, window.end), m.stats(series)
            note = "From samples: what moved between two of them is a mean."
        levels = (Level("ceiling", use.ceiling, "limit"),) if use.ceiling else ()
        plots.append(
            Plot(
                id=f"traffic-{len(plots)}", title=link_title(link), unit="rate",
                lines=(line("carried", points, colour_of(link), stats),), levels=levels,
                start=window.start, end=window.end, segments=window.segments, note=note,
            )
        )  # fmt: skip
    return plots


def binned(events: Sequence[Event], start: float, end: float) -> tuple[Point, ...]:
    """Bytes a second in each of BINS stretches, a copy's bytes spread evenly over its time. Drawn
    as stairs, so two points a stretch. The sum over the stretches is the bytes, exactly."""
    width = (end - start) / BINS
    held = [0.0] * BINS
    for event in events:
        if not event.nbytes or event.end < start or event.start >= end:
            continue
        seconds = event.seconds
        if seconds <= 0:  # shorter than the clock can tell
            held[min(BINS - 1, int((event.start - start) / width))] += event.nbytes
            continue
        first = max(0, int((event.start - start) / width))
        for k in range(first, min(BINS, int((event.end - start) / width) + 1)):
            low, high = start + k * width, start + (k + 1) * width
            share = max(0.0, min(event.end, high) - max(event.start, low)) / seconds
            held[k] += event.nbytes * share
    found = []
    for k, nbytes in enumerate(held):
        rate = nbytes / width
        found += [(start + k * width, rate), (start + (k + 0.999) * width, rate)]
    return tuple(found)


def load_plot(m: Measures, window: Window) -> Plot | None:
    """GPUs and cores: how busy."""
    names = {"cpu": "CPU cores, mean"}
    lines = tuple(
        line(
            names.get(key, f"GPU {key.split('.')[0].removeprefix('gpu')}"),
            series.around(window.start, window.end), at, m.stats(series),
        )
        for at, (key, series) in enumerate(m.load.items())
    )  # fmt: skip
    lines = tuple(drawn for drawn in lines if drawn.points)
    if not lines:
        return None
    return Plot(
        id="load", title="Processors, busy", unit="share", lines=lines, start=window.start,
        end=window.end, segments=window.segments, interval=m.run.observation.interval,
    )  # fmt: skip


def whole_run_plots(m: Measures) -> list[Plot]:
    """Memory from the first sample to the last, and how long each step took."""
    window = whole_window(m)
    if window is None:
        return []
    plots = []
    main = [k for k in m.memory if k.endswith((".allocated", ".used", ".rss", ".available"))]
    for owner in dict.fromkeys(key.split(".")[0] for key in main):
        keys = [key for key in main if key.startswith(f"{owner}.")]
        title = "Host memory" if owner == "host" else f"GPU {owner.removeprefix('gpu')} memory"
        lines = tuple(_run_line(m.memory[key], at) for at, key in enumerate(keys))
        plots.append(
            Plot(
                id=f"run-{owner}", title=f"{title}, whole run", unit="bytes", lines=lines,
                start=window.start, end=window.end, interval=m.run.observation.interval,
            )
        )  # fmt: skip
    if len(m.steps) > 1:
        steps = settled(m.steps)
        points = tuple((step.start, step.seconds) for step in steps)
        first = m.steps[0]
        warm = f" Step {first.number}, not drawn, took {seconds_text(first.seconds)}."
        plots.append(
            Plot(
                id="run-steps", title="Time of each step", unit="seconds", start=window.start,
                end=max(window.end, m.steps[-1].start), lines=(line("a step", points, 0),),
                note=f"Median {seconds_text(m.seconds)}.{warm * (first is not steps[0])}",
            )
        )  # fmt: skip
    return plots


def _run_line(series: Series, at: int) -> Line:
    return line(memory_title(series.key).split(", ")[-1], series.points, at)
