"""Choose the plots of a report page: their time windows, their lines, and the points in them."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.labels import link_title, memory_title, seconds_text, shorten, tier_name
from penstock.observe.markup import colour_of
from penstock.observe.measures import Measures
from penstock.observe.plots import Line, Plot, ReferenceLine, make_line
from penstock.observe.records import Event
from penstock.observe.series import Point, Series, stats_by_phase, tensors_are_hbm_tier
from penstock.observe.steps import PhaseTimeline, Segment, Step, without_warmup
from penstock.observe.usage import link_of

FEW_SAMPLES = 12
"""Number of samples below which a window is widened: a line needs points."""

ENOUGH_SAMPLES = 40
"""Number of samples up to which a window is widened."""

MIN_MEMORY_POINTS = 30
"""Points of GPU memory that show a step: it rises and falls within moments. With fewer, the
samples of all steps are overlaid."""

BINS = 240
"""Number of bins over which the bytes of copies are spread."""

COLOURS_OF = {"allocated": 0, "reserved": 1, "used": 2, "rss": 0, "pinned": 1, "tier": 3}


# Time windows.


@dataclass(frozen=True, slots=True)
class Window:
    """The time that a plot shows."""

    start: float
    end: float
    title: str
    segments: tuple[Segment, ...]
    overlaid: tuple[Step, ...] = ()
    """Steps whose points are all drawn in this window, because one step has too few."""

    @property
    def note(self) -> str:
        """Sentence about the window for the reader, or an empty string."""
        if not self.overlaid:
            return ""
        return f"Samples of {len(self.overlaid)} steps, overlaid phase by phase."


def step_window(m: Measures) -> Window | None:
    """Return the window of the shown step, or of the whole run if no step is known."""
    if m.shown is None:
        return run_window(m)
    return _window(m, m.shown, m.shown)


def overlay_steps(m: Measures, window: Window, keys: Sequence[str]) -> Window:
    """Overlay the points of all steps in the window, if one step has too few of these series."""
    points = max(len(m.memory[key].between(window.start, window.end)) for key in keys)
    steps = without_warmup(m.steps)
    if m.shown not in steps or len(steps) < 2 or points >= MIN_MEMORY_POINTS:
        return window
    return replace(window, overlaid=steps)


def widened_window(m: Measures) -> Window | None:
    """Return the window of the shown step and, if it has too few samples, of steps around it.

    Only steps that directly follow each other are joined: a save between two steps, for example,
    belongs to neither.
    """
    window = step_window(m)
    if window is None or m.shown is None or not m.run.samples:
        return window
    if _sample_count(m, window) >= FEW_SAMPLES:
        return window
    steady = without_warmup(m.steps)
    steps = steady if m.shown in steady else m.steps
    first = last = steps.index(m.shown)
    while _sample_count(m, _window(m, steps[first], steps[last])) < ENOUGH_SAMPLES:
        before = first - (first > 0 and steps[first - 1].end == steps[first].start)
        after = last + (last + 1 < len(steps) and steps[last].end == steps[last + 1].start)
        if (before, after) == (first, last):
            break
        first, last = before, after
    return _window(m, steps[first], steps[last])


def run_window(m: Measures) -> Window | None:
    """Return the window of the whole run, or None if nothing was recorded."""
    times = [sample.t for sample in m.run.samples]
    times += [t for event in m.run.events for t in (event.start, event.end)]
    times = [t for t in times if math.isfinite(t)]
    if not times or max(times) <= min(times):
        return None
    start, end = min(times), max(times)
    return Window(start, end, "whole run", PhaseTimeline(m.run.phases).between(start, end))


def _window(m: Measures, first: Step, last: Step) -> Window:
    title = f"step {first.number}"
    if last is not first:
        title = f"steps {first.number} to {last.number}"
    segments = PhaseTimeline(m.run.phases).between(first.start, last.end)
    return Window(first.start, last.end, title, segments)


def _sample_count(m: Measures, window: Window) -> int:
    times = [sample.t for sample in m.run.samples]  # samples are sorted by time
    return bisect.bisect_left(times, window.end) - bisect.bisect_left(times, window.start)


def points_in(series: Series, window: Window) -> tuple[Point, ...]:
    """Return a series' points in a window and one on each side, or those of all overlaid steps."""
    if not window.overlaid:
        return series.around(window.start, window.end)
    targets = _by_occurrence(window.segments)
    found: list[Point] = []
    for step in window.overlaid:
        for key, segment in _by_occurrence(step.segments).items():
            target = targets.get(key)
            if target is None:
                continue
            scale = (target.end - target.start) / (segment.end - segment.start)
            found += [
                (target.start + (t - segment.start) * scale, value)
                for t, value in series.between(segment.start, segment.end)
            ]
    return tuple(sorted(found))


def _by_occurrence(segments: Sequence[Segment]) -> dict[tuple[str, int], Segment]:
    """Index segments by name and occurrence: a step can have several forwards."""
    seen: Counter[str] = Counter()
    found = {}
    for segment in segments:
        found[segment.name, seen[segment.name]] = segment
        seen[segment.name] += 1
    return found


# Memory.


def memory_plots(m: Measures, window: Window) -> list[Plot]:
    """Return the plots of each GPU, the host, the tiers that are in neither, and the nodes."""
    groups: dict[str, list[str]] = {}
    for key in m.memory:
        if key != "host.available":
            groups.setdefault(_memory_group(key, m), []).append(key)
    plots: list[Plot] = []
    for group, keys in groups.items():
        own = [k for k in keys if k != "tier.hbm" or not tensors_are_hbm_tier(m.run, m.memory)]
        # Only GPU memory repeats in every step; host memory changes from step to step.
        shown = overlay_steps(m, window, own) if own[0].startswith("gpu") else window
        lines = tuple(_memory_line(m, key, at, shown) for at, key in enumerate(own))
        lines = tuple(line for line in lines if line.points)
        if lines:
            plots.append(
                Plot(
                    id=f"memory-{len(plots)}", title=group, unit="bytes", lines=lines,
                    references=_planned_lines(m, keys, window), start=window.start,
                    end=window.end, segments=window.segments,
                    interval=m.run.observation.interval, note=shown.note,
                )
            )  # fmt: skip
    return plots


def _memory_group(key: str, m: Measures) -> str:
    """Return the title of a series' plot. A tier is drawn with the memory that contains it."""
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
    colour = COLOURS_OF.get(what, at)
    title = memory_title(key).split(", ")
    name = title[-1] if len(title) > 1 and not key.startswith("node") else title[0]
    return make_line(name, points_in(series, window), colour, m.stats(series))


def _planned_lines(m: Measures, keys: Sequence[str], window: Window) -> tuple[ReferenceLine, ...]:
    """Return the budget and the planned peak of the tiers in a plot, by phase if possible."""
    planned = m.run.observation.planned
    if planned is None:
        return ()
    found = []
    for name in (key.removeprefix("tier.") for key in keys if key.startswith("tier.")):
        tier = planned.tiers.get(name)
        if tier is None:
            continue
        found.append(ReferenceLine(f"{tier_name(name)} budget", tier.budget, "limit"))
        peaks = {phase: most[name] for phase, most in planned.phases.items() if name in most}
        for phase, peak in peaks.items():
            spans = tuple((s.start, s.end) for s in window.segments if s.name == phase)
            if spans:
                title = f"planned for {shorten(phase)}"
                found.append(ReferenceLine(title, peak, "planned", spans))
        if not peaks:
            found.append(ReferenceLine("planned peak", tier.peak, "planned"))
    return tuple(found)


# Traffic and load.


def traffic_plots(m: Measures, window: Window) -> list[Plot]:
    """Return a plot of each link and its ceiling: from events if there are any."""
    plots: list[Plot] = []
    for link, usage in m.links.items():
        if usage.exact:
            moved = [e for e in m.run.events if e.link and link_of(e) == link]
            points = bin_traffic(moved, window.start, window.end)
            stats = stats_by_phase(points, window.segments)
            note = ""
        else:
            series = m.traffic[link]
            points, stats = series.around(window.start, window.end), m.stats(series)
            note = "From samples: each point is the mean since the previous one."
        ceiling = (ReferenceLine("ceiling", usage.ceiling, "limit"),) if usage.ceiling else ()
        plots.append(
            Plot(
                id=f"traffic-{len(plots)}", title=link_title(link), unit="rate",
                lines=(make_line("traffic", points, colour_of(link), stats),),
                references=ceiling, start=window.start, end=window.end,
                segments=window.segments, note=note,
            )
        )  # fmt: skip
    return plots


def bin_traffic(events: Sequence[Event], start: float, end: float) -> tuple[Point, ...]:
    """Return the bytes per second in each of BINS bins.

    The bytes of a copy are spread evenly over its time, so the sum over all bins is exactly the
    bytes that were copied. Each bin has two points, because it is drawn as a step.
    """
    width = (end - start) / BINS
    nbytes_in = [0.0] * BINS
    for event in events:
        if not event.nbytes or event.end < start or event.start >= end:
            continue
        seconds = event.seconds
        if seconds <= 0:  # shorter than the clock's resolution
            nbytes_in[min(BINS - 1, int((event.start - start) / width))] += event.nbytes
            continue
        first = max(0, int((event.start - start) / width))
        for k in range(first, min(BINS, int((event.end - start) / width) + 1)):
            low, high = start + k * width, start + (k + 1) * width
            share = max(0.0, min(event.end, high) - max(event.start, low)) / seconds
            nbytes_in[k] += event.nbytes * share
    found = []
    for k, nbytes in enumerate(nbytes_in):
        rate = nbytes / width
        found += [(start + k * width, rate), (start + (k + 0.999) * width, rate)]
    return tuple(found)


def load_plot(m: Measures, window: Window) -> Plot | None:
    """Return a plot of the load of GPUs and CPU cores, or None if it was not sampled."""
    names = {"cpu": "CPU cores, mean"}
    lines = tuple(
        make_line(
            names.get(key, f"GPU {key.split('.')[0].removeprefix('gpu')}"),
            series.around(window.start, window.end), at, m.stats(series),
        )
        for at, (key, series) in enumerate(m.load.items())
    )  # fmt: skip
    lines = tuple(line for line in lines if line.points)
    if not lines:
        return None
    return Plot(
        id="load", title="Processor load", unit="share", lines=lines, start=window.start,
        end=window.end, segments=window.segments, interval=m.run.observation.interval,
    )  # fmt: skip


# The whole run.


def whole_run_plots(m: Measures) -> list[Plot]:
    """Return plots of memory over the whole run, and of the time of each step."""
    window = run_window(m)
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
        plots.append(_step_time_plot(m, window))
    return plots


def _step_time_plot(m: Measures, window: Window) -> Plot:
    steps, first = without_warmup(m.steps), m.steps[0]
    points = tuple((step.start, step.seconds) for step in steps)
    note = f"Median {seconds_text(m.seconds)}."
    if first is not steps[0]:
        note += f" Step {first.number} (warm-up, not drawn) took {seconds_text(first.seconds)}."
    return Plot(
        id="run-steps", title="Step time", unit="seconds", start=window.start,
        end=max(window.end, m.steps[-1].start), lines=(make_line("step time", points, 0),),
        note=note,
    )  # fmt: skip


def _run_line(series: Series, at: int) -> Line:
    return make_line(memory_title(series.key).split(", ")[-1], series.points, at)
