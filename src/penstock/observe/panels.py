"""Which plots a run's page has, and what is on each. Room: show."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.observe.markup import colour_of
from penstock.observe.measures import Measures
from penstock.observe.peaks import holds_hbm
from penstock.observe.plots import Level, Line, Plot, line
from penstock.observe.records import Event
from penstock.observe.series import Point, Series, by_phase
from penstock.observe.steps import settled
from penstock.observe.usage import link_of
from penstock.observe.windows import Window, laid_window, points_in, whole_window
from penstock.observe.words import link_title, memory_title, seconds_text, tidy

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
