"""Lines over time as SVG that needs no script, with a table behind each. Room: show.

The drawing is stretched to its frame; labels are HTML beside it, so that they stay readable at
every width. A plot's x runs from 0 to 1000, which is also what the page's script zooms by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.observe.labels import nbytes_text, percent, rate_text, seconds_text, tidy
from penstock.observe.markup import COLOURS, folded, number, table, tag, text
from penstock.observe.series import Point, Stat, thinned, unbroken
from penstock.observe.steps import UNNAMED, Segment
from penstock.units import GiB, KiB, MiB, TiB

WIDE = 1000
TALL = 100
MARGIN = 2
BUCKETS = 250
"""Of time, each of which keeps its extremes: a line has at most four times as many points."""

PHASE_CLASSES = 12

Unit = Literal["bytes", "rate", "share", "seconds"]

_SAY: dict[Unit, Callable[[float], str]] = {
    "bytes": nbytes_text, "rate": rate_text, "share": percent, "seconds": seconds_text,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One series to draw."""

    name: str
    points: tuple[Point, ...]
    colour: int
    stats: dict[str, Stat]
    """For the table: the series in each phase."""


@dataclass(frozen=True, slots=True)
class Level:
    """A line across: a plan, a budget, a ceiling. Over part of the time where it says so."""

    name: str
    value: float
    kind: Literal["planned", "limit"]
    spans: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Lines over one window of time."""

    id: str
    title: str
    unit: Unit
    start: float
    end: float
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    segments: tuple[Segment, ...] = ()
    interval: float = math.inf
    """Of the samples; lines are broken over longer holes."""

    note: str = ""
    at_least: float = 0.0
    """What the y axis reaches anyway: so that two plots can be compared."""

    def x(self, t: float) -> float:
        return WIDE * (t - self.start) / (self.end - self.start)

    @property
    def highest(self) -> float:
        return max((v for line in self.lines for _, v in line.points), default=0.0)

    @property
    def top(self) -> float:
        """Of the y axis: a level far above all lines is told in the legend and not drawn."""
        highest = max(self.highest, self.at_least)
        drawn = [level.value for level in self.levels if level.value <= 1.6 * highest]
        if self.unit == "share":
            return 1.0
        return nice(max([highest, *drawn]) * 1.02, self.unit)


def nice(value: float, unit: Unit) -> float:
    """The next round number, in units of 1024 where bytes are shown so."""
    if value <= 0:
        return 1.0
    scale = 1.0
    if unit == "bytes":
        scale = next((s for s in (TiB, GiB, MiB, KiB) if value >= s), 1)
    digits = 10.0 ** math.floor(math.log10(value / scale))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(
        step * digits * scale for step in steps if step * digits * scale >= value * 0.999999
    )


class Phases:
    """Numbers for phases, the same on the whole page: what toggles and colours go by."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(name for name in names if name != UNNAMED))
        self._places = {name: at for at, name in enumerate(self.names)}

    def place(self, name: str | None) -> int:
        """-1 for no phase. Past the last class they share it."""
        return min(self._places.get(name or "", -1), PHASE_CLASSES - 1)

    def shown(self) -> list[tuple[int, str]]:
        return [(at, tidy(name, 40)) for at, name in enumerate(self.names[:PHASE_CLASSES])]


def draw(plot: Plot, phases: Phases) -> str:
    """The figure: title, legend, drawing, labels and the table behind it."""
    top = plot.top
    drawn = _shades(plot, phases) + _grid() + "".join(_level(plot, lv, top) for lv in plot.levels)
    drawn += "".join(_path(plot, line, top) for line in plot.lines)
    box = f"0 -{MARGIN} {WIDE} {TALL + 2 * MARGIN}"  # a line at an edge is as wide as others
    svg = tag("svg", drawn, viewBox=box, preserveAspectRatio="none", role="img",
              aria_label=_spoken(plot))  # fmt: skip
    ticks = "".join(
        tag("span", text(_SAY[plot.unit](top * k / 2) if k else "0"), style=f"bottom:{50 * k}%")
        for k in range(3)
    )
    area = tag("div", band(plot.segments, plot.x, phases), svg, class_="area")
    frame = tag("div", tag("div", ticks, class_="y", aria_hidden="true"), area,
                time_labels(plot.start, plot.end), class_="frame")  # fmt: skip
    caption = tag("figcaption", tag("h3", text(plot.title)), _legend(plot))
    note = tag("p", text(plot.note), class_="note") if plot.note else ""
    readout = tag("p", class_="readout", aria_live="off")
    return tag("figure", caption, frame, readout, note, folded("Figures by phase", _table(plot)),
               class_="plot", id=plot.id, data_start=_exact(plot.start), data_end=_exact(plot.end),
               data_top=_exact(top), data_unit=plot.unit)  # fmt: skip


def _exact(value: float) -> str:
    return repr(float(value))


def band(segments: Sequence[Segment], x: Callable[[float], float], phases: Phases) -> str:
    """Names of the phases over the drawing."""
    made = []
    for segment in segments:
        if (at := phases.place(segment.name)) < 0:
            continue
        left, right = x(segment.start) / 10, x(segment.end) / 10
        if right - left < 0.05:
            continue
        name, where = tidy(segment.name, 40), f"left:{number(left)}%;width:{number(right - left)}%"
        made.append(
            tag("span", text(name), class_=f"p{at} phase", title=name, style=where,
                data_a=left * 10, data_b=right * 10)
        )  # fmt: skip
    return tag("div", "".join(made), class_="band", aria_hidden="true")


def _shades(plot: Plot, phases: Phases) -> str:
    return "".join(
        tag("rect", x=plot.x(s.start), y=0, width=plot.x(s.end) - plot.x(s.start), height=TALL,
            class_=f"shade p{at} s{at % 4}")
        for s in plot.segments if (at := phases.place(s.name)) >= 0
    )  # fmt: skip


def _grid() -> str:
    lines = "".join(f"M0 {y}H{WIDE}" for y in (0, TALL // 2, TALL))
    return tag("path", d=lines, class_="grid")


def _level(plot: Plot, level: Level, top: float) -> str:
    if level.value > top:
        return ""
    y = number(TALL * (1 - level.value / top))
    spans = level.spans or ((plot.start, plot.end),)
    d = "".join(f"M{number(plot.x(a))} {y}H{number(plot.x(b))}" for a, b in spans)
    return tag("path", d=d, class_=f"level {level.kind}")


def _path(plot: Plot, line: Line, top: float) -> str:
    d = ""
    for stretch in unbroken(line.points, plot.interval):
        for at, (t, value) in enumerate(stretch):
            y = TALL * (1 - max(0.0, value) / top)
            d += f"{'L' if at else 'M'}{number(plot.x(t))} {number(y)}"
        if len(stretch) == 1:
            d += "h0.01"  # a lone sample is a dot
    return tag("path", d=d, class_=_line_class(plot, line))


def _line_class(plot: Plot, line: Line) -> str:
    """A line that is alone needs no dashes to be told apart."""
    return f"line c{line.colour % COLOURS}{' only' if len(plot.lines) == 1 else ''}"


def _legend(plot: Plot) -> str:
    say = _SAY[plot.unit]
    items = []
    for line in plot.lines:
        inside = [v for t, v in line.points if plot.start <= t <= plot.end]
        most = f" up to {say(max(inside))}" if inside else ""
        items.append(tag("li", _key(_line_class(plot, line)), text(line.name + most)))
    top = plot.top
    for level in plot.levels:
        beyond = " (above the plot)" if level.value > top else ""
        key = _key(f"level {level.kind}")
        items.append(tag("li", key, text(f"{level.name} {say(level.value)}{beyond}")))
    return tag("ul", "".join(items), class_="legend")


def _key(class_: str) -> str:
    line = tag("path", d="M0 5H26", class_=class_)
    return tag("svg", line, viewBox="0 0 26 10", class_="key", aria_hidden="true")


def _spoken(plot: Plot) -> str:
    """The text alternative: what a reader would take from the picture."""
    say = _SAY[plot.unit]
    parts = []
    for line in plot.lines:
        values = [value for _, value in line.points]
        if values:
            parts.append(f"{line.name} between {say(min(values))} and {say(max(values))}")
    parts += [f"{level.name} {say(level.value)}" for level in plot.levels]
    when = f"{seconds_text(plot.end - plot.start)} of time"
    return tidy(f"{plot.title}, {when}: {'; '.join(parts) or 'nothing recorded'}.", 600)


def _table(plot: Plot) -> str:
    say = _SAY[plot.unit]
    rows = [
        (line.name, tidy(phase, 40), say(stat.low), say(stat.mean), say(stat.high))
        for line in plot.lines
        for phase, stat in list(line.stats.items())[:PHASE_CLASSES]
    ]
    head = ("series", "phase", "lowest", "mean", "highest")
    return table(head, rows, caption=f"{plot.title}: by phase, over the settled steps")


def time_labels(start: float, end: float, count: int = 5) -> str:
    """Seconds since the window's start, which the page's script rewrites when it zooms."""
    made = "".join(
        tag("span", text(seconds_text((end - start) * k / (count - 1))),
            style=f"left:{number(100 * k / (count - 1))}%")
        for k in range(count)
    )  # fmt: skip
    return tag("div", made, class_="x", aria_hidden="true")


def plot_data(plot: Plot) -> dict[str, Any]:
    """For the page's script: what the cursor reads off."""
    return {
        "lines": [
            {
                "name": tidy(line.name),
                "x": [round(plot.x(t), 2) for t, _ in line.points],
                "y": [_short(value) for _, value in line.points],
            }
            for line in plot.lines
        ]
    }


def _short(value: float) -> float:
    """Six figures are more than a screen has pixels."""
    return float(f"{value:.6g}") if value % 1 or value > 1e6 else value


def line(
    name: str, points: Sequence[Point], colour: int, stats: dict[str, Stat] | None = None
) -> Line:
    """A line with no more points than can be seen, extremes kept."""
    return Line(name, thinned(points, BUCKETS), colour, stats or {})
