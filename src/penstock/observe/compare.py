"""Compare two runs, in figures and in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.observe.labels import (
    NO_VALUE,
    capitalize,
    link_title,
    memory_title,
    moved_text,
    nbytes_text,
    percent,
    resource_name,
    seconds_text,
    shorten,
)
from penstock.observe.measures import Measures
from penstock.observe.page import verdict

FigureUnit = Literal["seconds", "rate", "bytes", "moved", "share"]
Better = Literal["lower", "higher", "neither"]

MAX_NAMED = 3
"""Number of phases, links and peaks that get a sentence."""

SIMILAR = 0.02
"""Relative difference below which two figures count as equal."""

_FORMAT: dict[FigureUnit, Callable[[float], str]] = {
    "seconds": seconds_text,
    "rate": lambda value: f"{value:.3g}",
    "bytes": nbytes_text,
    "moved": moved_text,
    "share": percent,
}


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both runs; None if a run does not have it."""

    group: str
    name: str
    unit: FigureUnit
    before: float | None
    after: float | None
    better: Better = "lower"

    @property
    def ratio(self) -> float | None:
        """The second figure divided by the first."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return self.after / self.before

    def say(self, value: float | None) -> str:
        """Format a figure of this row."""
        return NO_VALUE if value is None else _FORMAT[self.unit](value)

    @property
    def change(self) -> str:
        """The ratio, such as `1.61x`, or the difference of shares in percentage points."""
        if self.unit == "share":
            if self.before is None or self.after is None:
                return NO_VALUE
            return f"{100 * (self.after - self.before):+.0f} points"
        return NO_VALUE if self.ratio is None else f"{self.ratio:.2f}x"

    @property
    def judged(self) -> str:
        """`better`, `worse`, or an empty string if it is neither."""
        if self.before is None or self.after is None or self.better == "neither":
            return ""
        tolerance = SIMILAR * max(abs(self.before), abs(self.after))
        if abs(self.after - self.before) <= tolerance:
            return ""
        return "better" if (self.after < self.before) == (self.better == "lower") else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs compared."""

    rows: tuple[ComparisonRow, ...]
    words: tuple[str, ...]
    """Sentences about the differences. The first one is about speed."""


def compare(before: Measures, after: Measures) -> Comparison:
    """Compare two runs, A and B."""
    rows = tuple(_rows(before, after))
    return Comparison(rows, tuple(_sentences(before, after, rows)))


def comparison_json(a: Measures, b: Measures, comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for programs. Its keys are a stable interface."""
    return {
        "runs": [
            {"verdict": verdict(m), "seconds": m.seconds, "steps": len(m.steps)} for m in (a, b)
        ],
        "rows": [
            {
                "group": row.group, "name": row.name, "unit": row.unit, "before": row.before,
                "after": row.after, "ratio": row.ratio, "judged": row.judged,
            }
            for row in comparison.rows
        ],
        "words": list(comparison.words),
    }  # fmt: skip


# The table.


def _rows(a: Measures, b: Measures) -> Iterator[ComparisonRow]:
    yield ComparisonRow("step", "step time", "seconds", a.seconds, b.seconds)
    rates = _steps_per_second(a), _steps_per_second(b)
    yield ComparisonRow("step", "steps per second", "rate", *rates, "higher")
    for name in _all_keys(a.phases, b.phases):
        seconds = a.phases.get(name), b.phases.get(name)
        yield ComparisonRow("phase", shorten(name, 40), "seconds", *seconds)
    for name in _all_keys(a.busy, b.busy):
        title = f"{resource_name(name, a)}, share of a step"
        shares = a.busy.get(name), b.busy.get(name)
        yield ComparisonRow("busy", title, "share", *shares, "neither")
    title = "copies hidden behind compute"
    yield ComparisonRow("overlap", title, "share", a.hidden, b.hidden, "higher")
    yield ComparisonRow("overlap", "copies not hidden, per step", "seconds", a.exposed, b.exposed)
    for link in _all_keys(a.links, b.links):
        left, right = (m.links[link].nbytes if link in m.links else None for m in (a, b))
        title = f"{link_title(link)}, per step"
        yield ComparisonRow("link", title, "moved", left, right, "neither")
    peaks_a, peaks_b = ({peak.key: peak.measured for peak in m.peaks} for m in (a, b))
    for key in _all_keys(peaks_a, peaks_b):
        peaks = peaks_a.get(key), peaks_b.get(key)
        if peaks != (None, None):
            # Other programs use a node too, and more pinned memory is neither good nor bad.
            better: Better = "neither" if key.startswith("node") or "pinned" in key else "lower"
            yield ComparisonRow("peak", memory_title(key), "bytes", *peaks, better)


def _steps_per_second(m: Measures) -> float | None:
    return 1 / m.seconds if m.seconds else None


def _all_keys(left: Mapping[str, object], right: Mapping[str, object]) -> Iterable[str]:
    return dict.fromkeys([*left, *right])


# The sentences.


def _sentences(a: Measures, b: Measures, rows: tuple[ComparisonRow, ...]) -> Iterator[str]:
    yield _speed(a, b)
    if a.seconds is not None and b.seconds is not None:
        yield from _changed_phases(rows, max(a.seconds, b.seconds))
    bottlenecks = a.bottleneck.resource, b.bottleneck.resource
    if bottlenecks[0] != bottlenecks[1] and all(bottlenecks):
        yield f"A: {verdict(a)}. B: {verdict(b)}."
    if a.hidden is not None and b.hidden is not None and abs(a.hidden - b.hidden) > SIMILAR:
        yield (
            f"Copy time hidden behind compute: {percent(a.hidden)} in A, {percent(b.hidden)} in B."
        )
    for group in ("link", "peak"):
        for row in _most_changed(rows, group):
            more = "more" if row.after is not None and row.after > (row.before or 0) else "less"
            yield f"{row.name}: {more} in B, {row.say(row.after)} instead of {row.say(row.before)}."
    if a.run.observation.hardware != b.run.observation.hardware:
        yield (
            "The runs used different hardware, so the differences come from the machines as well "
            "as from the programs."
        )


def _speed(a: Measures, b: Measures) -> str:
    if a.seconds is None or b.seconds is None:
        runs = [name for name, m in (("A", a), ("B", b)) if m.seconds is None]
        return f"No steps were recorded in {' and '.join(runs)}: speeds cannot be compared."
    times = f"{seconds_text(b.seconds)} per step instead of {seconds_text(a.seconds)}"
    ratio = a.seconds / b.seconds
    if abs(ratio - 1) <= SIMILAR:
        return (
            f"A and B are equally fast: {seconds_text(a.seconds)} and {seconds_text(b.seconds)} "
            f"per step."
        )
    if ratio > 1:
        return f"B is {ratio:.2f} times as fast as A: {times}."
    return f"B is slower and takes {1 / ratio:.2f} times as long as A: {times}."


def _changed_phases(rows: tuple[ComparisonRow, ...], whole: float) -> Iterator[str]:
    """Yield a sentence for each of the phases that changed most."""
    changed = []
    for row in rows:
        if row.group == "phase":
            delta = (row.after or 0.0) - (row.before or 0.0)
            if abs(delta) > SIMILAR * whole:
                changed.append((delta, row))
    for delta, row in sorted(changed, key=lambda pair: -abs(pair[0]))[:MAX_NAMED]:
        more = "more" if delta > 0 else "less"
        before, after = ("none" if v is None else row.say(v) for v in (row.before, row.after))
        yield (
            f"{capitalize(row.name)} takes {seconds_text(abs(delta))} {more} in B: {after} instead "
            f"of {before}."
        )


def _most_changed(rows: tuple[ComparisonRow, ...], group: str) -> list[ComparisonRow]:
    """Return the rows of a group whose ratios are furthest from one, in the table's order."""
    changed = [
        (abs(math.log(row.ratio)), row)
        for row in rows
        if row.group == group and row.ratio and abs(row.ratio - 1) > SIMILAR
    ]
    most = [row for _, row in sorted(changed, key=lambda pair: -pair[0])[:MAX_NAMED]]
    return [row for row in rows if row in most]
