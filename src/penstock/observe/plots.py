"""Draw lines over time, or over steps, as SVG that needs no script, with a table of the figures.

The drawing is stretched to its frame. Labels are HTML outside the drawing, so they stay readable at
every width. The x axis of a plot runs from 0 to 1000; the page's script uses the same coordinates
for zooming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.observe.labels import (
    nbytes_text,
    number_text,
    percent,
    rate_text,
    seconds_text,
    shorten,
)
from penstock.observe.markup import COLOURS, details, number, table, tag, text
from penstock.observe.series import Point, Stat, split_at_gaps, thin
from penstock.observe.steps import UNNAMED, Segment
from penstock.units import GiB, KiB, MiB, TiB

WIDTH = 1000
HEIGHT = 100
MARGIN = 2

BUCKETS = 250
"""Buckets of time to which a line is thinned. Each keeps its extremes, so a line has at most four
times as many points."""

PHASE_CLASSES = 12
"""Number of phases with their own toggle and CSS class (p0 to p11 in page.css)."""

PHASE_COLOURS = {"forward": 0, "backward": 1, "update": 2, "data": 3, "evaluate": 4, "save": 6}
"""Colours of the phases that Penstock detects (s0 to s7 in page.css). They are the same on every
page, so that two reports can be compared at a glance."""

OTHER_PHASE_COLOURS = (7, 5)
"""Colours of phases that the program names itself, in the order in which they occur."""

Unit = Literal["bytes", "rate", "share", "seconds", "number"]
"""Unit of the y axis."""

XUnit = Literal["seconds", "step"]

_FORMAT: dict[Unit, Callable[[float], str]] = {
    "bytes": nbytes_text, "rate": rate_text, "share": percent, "seconds": seconds_text,
    "number": number_text,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One series to draw."""

    name: str
    points: tuple[Point, ...]
    colour: int
    stats: dict[str, Stat]
    """Statistics of the series in each phase, for the table."""


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A horizontal line: a planned peak, a budget or a ceiling."""

    name: str
    value: float
    kind: Literal["planned", "limit"]
    spans: tuple[tuple[float, float], ...] = ()
    """Parts of the time that it covers; all of it if empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Lines over one time window, or over steps."""

    id: str
    title: str
    unit: Unit
    start: float
    end: float
    lines: tuple[Line, ...]
    references: tuple[ReferenceLine, ...] = ()
    segments: tuple[Segment, ...] = ()
    interval: float = math.inf
    """Seconds between samples. Lines are interrupted where samples are missing."""

    note: str = ""
    at_least: float = 0.0
    """Value that the y axis must reach, so that two plots can be compared."""

    x_unit: XUnit = "seconds"
    bottom: float = 0.0
    """Value at the bottom of the y axis. A loss rarely comes near 0, so its axis starts above."""

    def x(self, t: float) -> float:
        """Return the x coordinate of a time or a step."""
        return WIDTH * (t - self.start) / (self.end - self.start)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        return HEIGHT * (1 - max(0.0, value - self.bottom) / (self.top - self.bottom))

    @property
    def highest(self) -> float:
        """Highest value of all lines."""
        return max((v for line in self.lines for _, v in line.points), default=0.0)

    @property
    def top(self) -> float:
        """Top of the y axis. A reference line far above all lines is only listed in the legend."""
        highest = max(self.highest, self.at_least)
        drawn = [ref.value for ref in self.references if ref.value <= 1.6 * highest]
        if self.unit == "share":
            return 1.0
        if self.unit == "number":
            return highest
        return round_up(max([highest, *drawn]) * 1.02, self.unit)


def round_up(value: float, unit: Unit) -> float:
    """Return the next round number, in binary units for bytes."""
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


class PhaseIndex:
    """Numbers for phases, the same on the whole page, which determine toggles and colours."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(name for name in names if name != UNNAMED))
        self._numbers = {name: at for at, name in enumerate(self.names)}

    def number(self, name: str | None) -> int:
        """Return a phase's number, or -1 for no phase. Phases after the last class share it."""
        return min(self._numbers.get(name or "", -1), PHASE_CLASSES - 1)

    def colour(self, name: str) -> int:
        """Return the number of a phase's colour."""
        if name in PHASE_COLOURS:
            return PHASE_COLOURS[name]
        others = [each for each in self.names if each not in PHASE_COLOURS]
        return OTHER_PHASE_COLOURS[others.index(name) % len(OTHER_PHASE_COLOURS)]

    def shown(self) -> list[tuple[int, str]]:
        """Return the number and name of each phase that has a toggle."""
        return [(at, shorten(name, 40)) for at, name in enumerate(self.names[:PHASE_CLASSES])]


def make_line(
    name: str, points: Sequence[Point], colour: int, stats: dict[str, Stat] | None = None
) -> Line:
    """Create a line with no more points than can be seen; extremes are kept."""
    return Line(name, thin(points, BUCKETS), colour, stats or {})


def draw_plot(plot: Plot, phases: PhaseIndex) -> str:
    """Return the figure: title, legend, drawing, labels and the table of the figures."""
    drawing = _shades(plot, phases) + _grid()
    drawing += "".join(_reference_path(plot, ref) for ref in plot.references)
    drawing += "".join(_line_path(plot, line) for line in plot.lines)
    box = f"0 -{MARGIN} {WIDTH} {HEIGHT + 2 * MARGIN}"  # a line at an edge is not cut in half
    svg = tag("svg", drawing, viewBox=box, preserveAspectRatio="none", role="img",
              aria_label=_text_alternative(plot))  # fmt: skip
    ticks = "".join(
        tag("span", text(_tick(plot, k / 2)), style=f"bottom:{50 * k}%") for k in range(3)
    )
    area = tag("div", phase_band(plot.segments, plot.x, phases), svg, class_="area")
    labels = (time_labels if plot.x_unit == "seconds" else step_labels)(plot.start, plot.end)
    frame = tag("div", tag("div", ticks, class_="y", aria_hidden="true"), area, labels,
                class_="frame")  # fmt: skip
    caption = tag("figcaption", tag("h3", text(plot.title)), _legend(plot))
    note = tag("p", text(plot.note), class_="note") if plot.note else ""
    readout = tag("p", class_="readout", aria_live="off")
    by_phase = plot.x_unit == "seconds"
    figures = details("Figures by phase" if by_phase else "Figures", _table(plot))
    return tag("figure", caption, frame, readout, note, figures,
               class_="plot", id=plot.id, data_start=_exact(plot.start), data_end=_exact(plot.end),
               data_top=_exact(plot.top), data_unit=plot.unit, data_x=plot.x_unit)  # fmt: skip


def _tick(plot: Plot, share: float) -> str:
    value = plot.bottom + share * (plot.top - plot.bottom)
    return _FORMAT[plot.unit](value) if value else "0"


def _exact(value: float) -> str:
    return repr(float(value))


def phase_band(segments: Sequence[Segment], x: Callable[[float], float], phases: PhaseIndex) -> str:
    """Return the names of the phases above the drawing."""
    labels = []
    for segment in segments:
        if (at := phases.number(segment.name)) < 0:
            continue
        left, right = x(segment.start) / 10, x(segment.end) / 10
        if right - left < 0.05:
            continue
        name, style = (
            shorten(segment.name, 40),
            f"left:{number(left)}%;width:{number(right - left)}%",
        )
        labels.append(
            tag("span", text(name), class_=f"p{at} phase", title=name, style=style,
                data_a=left * 10, data_b=right * 10)
        )  # fmt: skip
    return tag("div", "".join(labels), class_="band", aria_hidden="true")


def _shades(plot: Plot, phases: PhaseIndex) -> str:
    return "".join(
        tag("rect", x=plot.x(s.start), y=0, width=plot.x(s.end) - plot.x(s.start), height=HEIGHT,
            class_=f"shade p{at} s{phases.colour(s.name)}")
        for s in plot.segments if (at := phases.number(s.name)) >= 0
    )  # fmt: skip


def _grid() -> str:
    lines = "".join(f"M0 {y}H{WIDTH}" for y in (0, HEIGHT // 2, HEIGHT))
    return tag("path", d=lines, class_="grid")


def _reference_path(plot: Plot, reference: ReferenceLine) -> str:
    if reference.value > plot.top:
        return ""
    y = number(plot.y(reference.value))
    spans = reference.spans or ((plot.start, plot.end),)
    d = "".join(f"M{number(plot.x(a))} {y}H{number(plot.x(b))}" for a, b in spans)
    return tag("path", d=d, class_=f"level {reference.kind}")


def _line_path(plot: Plot, line: Line) -> str:
    d = ""
    for part in split_at_gaps(line.points, plot.interval):
        for at, (t, value) in enumerate(part):
            d += f"{'L' if at else 'M'}{number(plot.x(t))} {number(plot.y(value))}"
        if len(part) == 1:
            d += "h0.01"  # a single sample is drawn as a dot
    return tag("path", d=d, class_=_line_class(plot, line))


def _line_class(plot: Plot, line: Line) -> str:
    """Return the CSS class of a line. A single line needs no dashes."""
    return f"line c{line.colour % COLOURS}{' only' if len(plot.lines) == 1 else ''}"


def _legend(plot: Plot) -> str:
    say = _FORMAT[plot.unit]
    items = []
    for line in plot.lines:
        inside = [v for t, v in line.points if plot.start <= t <= plot.end]
        range_text = f" up to {say(max(inside))}" if inside else ""
        if plot.x_unit == "step":
            range_text = f" from {say(inside[0])} to {say(inside[-1])}"
        items.append(tag("li", _key(_line_class(plot, line)), text(line.name + range_text)))
    top = plot.top
    for ref in plot.references:
        beyond = " (above the plot)" if ref.value > top else ""
        key = _key(f"level {ref.kind}")
        items.append(tag("li", key, text(f"{ref.name} {say(ref.value)}{beyond}")))
    return tag("ul", "".join(items), class_="legend")


def _key(class_: str) -> str:
    line = tag("path", d="M0 5H26", class_=class_)
    return tag("svg", line, viewBox="0 0 26 10", class_="key", aria_hidden="true")


def _text_alternative(plot: Plot) -> str:
    """Describe the plot for screen readers."""
    say = _FORMAT[plot.unit]
    parts = []
    for line in plot.lines:
        values = [value for _, value in line.points]
        if values:
            parts.append(f"{line.name} between {say(min(values))} and {say(max(values))}")
    parts += [f"{ref.name} {say(ref.value)}" for ref in plot.references]
    duration = seconds_text(plot.end - plot.start)
    if plot.x_unit == "step":
        duration = f"steps {plot.start:,.0f} to {plot.end:,.0f}"
    return shorten(f"{plot.title} over {duration}: {'; '.join(parts) or 'nothing recorded'}.", 600)


def _table(plot: Plot) -> str:
    say = _FORMAT[plot.unit]
    if plot.x_unit == "step":
        steps = [
            (line.name, *(say(v) for v in (line.points[0][1], min(values), line.points[-1][1])))
            for line in plot.lines
            for values in [[v for _, v in line.points]]
        ]
        return table(("series", "first", "lowest", "last"), steps, caption=plot.title)
    rows = [
        (line.name, shorten(phase, 40), say(stat.low), say(stat.mean), say(stat.high))
        for line in plot.lines
        for phase, stat in list(line.stats.items())[:PHASE_CLASSES]
    ]
    head = ("series", "phase", "lowest", "mean", "highest")
    return table(head, rows, caption=f"{plot.title}: by phase, without the warm-up step")


def time_labels(start: float, end: float, count: int = 5) -> str:
    """Return labels of seconds since the start. The page's script updates them when it zooms."""
    labels = "".join(
        tag("span", text(seconds_text((end - start) * k / (count - 1))),
            style=f"left:{number(100 * k / (count - 1))}%")
        for k in range(count)
    )  # fmt: skip
    return tag("div", labels, class_="x", aria_hidden="true")


def step_labels(start: float, end: float, count: int = 5) -> str:
    """Return labels of steps. The page's script updates them when it zooms."""
    labels = "".join(
        tag("span", text(f"{start + (end - start) * k / (count - 1):,.0f}"),
            style=f"left:{number(100 * k / (count - 1))}%")
        for k in range(count)
    )  # fmt: skip
    return tag("div", labels, class_="x", aria_hidden="true")


def plot_data(plot: Plot) -> dict[str, Any]:
    """Return the points for the page's script, which shows the values under the cursor."""
    return {
        "lines": [
            {
                "name": shorten(line.name),
                "x": [round(plot.x(t), 2) for t, _ in line.points],
                "y": [_round(value) for _, value in line.points],
            }
            for line in plot.lines
        ]
    }


def _round(value: float) -> float:
    """Round to six significant digits, which is more than a screen has pixels."""
    return float(f"{value:.6g}") if value % 1 or value > 1e6 else value
