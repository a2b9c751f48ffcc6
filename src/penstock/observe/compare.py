"""Two runs beside each other, in figures and in words. Room: show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.observe.labels import (
    NONE,
    capital,
    link_title,
    memory_title,
    moved_text,
    nbytes_text,
    percent,
    resource_name,
    seconds_text,
    tidy,
)
from penstock.observe.measures import Measures
from penstock.observe.page import verdict

Unit = Literal["seconds", "rate", "bytes", "moved", "share"]
Better = Literal["lower", "higher", "neither"]

TOLD = 3
"""Links and peaks that are told in words."""

NONE_AT_ALL = "none"

ALIKE = 0.02
"""A difference below this is not worth a sentence."""

_SAY: dict[Unit, Callable[[float], str]] = {
    "seconds": seconds_text,
    "rate": lambda value: f"{value:.3g}",
    "bytes": nbytes_text,
    "moved": moved_text,
    "share": percent,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both runs. None where a run does not have it."""

    group: str
    name: str
    unit: Unit
    before: float | None
    after: float | None
    better: Better = "lower"

    @property
    def ratio(self) -> float | None:
        """The second over the first."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return self.after / self.before

    def say(self, value: float | None) -> str:
        return NONE if value is None else _SAY[self.unit](value)

    @property
    def change(self) -> str:
        """`1.61x`, or how many points a share moved."""
        if self.unit == "share":
            if self.before is None or self.after is None:
                return NONE
            return f"{100 * (self.after - self.before):+.0f} points"
        return NONE if self.ratio is None else f"{self.ratio:.2f}x"

    @property
    def judged(self) -> str:
        """`better`, `worse`, or nothing where neither can be said."""
        if self.before is None or self.after is None or self.better == "neither":
            return ""
        near = ALIKE * max(abs(self.before), abs(self.after))
        if abs(self.after - self.before) <= near:
            return ""
        return "better" if (self.after < self.before) == (self.better == "lower") else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it."""

    rows: tuple[Row, ...]
    words: tuple[str, ...]


def compare(before: Measures, after: Measures) -> Comparison:
    rows = tuple(_rows(before, after))
    return Comparison(rows, tuple(_words(before, after, rows)))


def _rows(a: Measures, b: Measures) -> Iterator[Row]:
    yield Row("step", "a step", "seconds", a.seconds, b.seconds)
    yield Row("step", "steps a second", "rate", _inverse(a), _inverse(b), "higher")
    for name in _names(a.phases, b.phases):
        yield Row("phase", tidy(name, 40), "seconds", a.phases.get(name), b.phases.get(name))
    for name in _names(a.busy, b.busy):
        title = f"{resource_name(name, a)}, of a step"
        yield Row("busy", title, "share", a.busy.get(name), b.busy.get(name), "neither")
    yield Row("overlap", "copies hidden behind compute", "share", a.hidden, b.hidden, "higher")
    yield Row("overlap", "copies not hidden, a step", "seconds", a.exposed, b.exposed)
    for link in _names(a.links, b.links):
        left, right = (m.links[link].nbytes if link in m.links else None for m in (a, b))
        yield Row("link", f"{link_title(link)}, a step", "moved", left, right, "neither")
    mine, theirs = ({peak.key: peak.measured for peak in m.peaks} for m in (a, b))
    for key in _names(mine, theirs):
        if mine.get(key) is not None or theirs.get(key) is not None:
            # Others use a node too, and what is pinned is neither good nor bad.
            better: Better = "neither" if key.startswith("node") or "pinned" in key else "lower"
            yield Row("peak", memory_title(key), "bytes", mine.get(key), theirs.get(key), better)


def _inverse(m: Measures) -> float | None:
    return 1 / m.seconds if m.seconds else None


def _names(left: Mapping[str, object], right: Mapping[str, object]) -> Iterable[str]:
    return dict.fromkeys([*left, *right])


def _words(a: Measures, b: Measures, rows: tuple[Row, ...]) -> Iterator[str]:
    yield _speed(a, b)
    if a.seconds is not None and b.seconds is not None:
        yield from _moved_phases(rows, max(a.seconds, b.seconds))
    if a.bound.resource != b.bound.resource and a.bound.resource and b.bound.resource:
        yield f"A: {verdict(a)}. B: {verdict(b)}."
    if a.hidden is not None and b.hidden is not None and abs(a.hidden - b.hidden) > ALIKE:
        yield f"Copy time hidden behind compute: {percent(a.hidden)}, then {percent(b.hidden)}."
    for group in ("link", "peak"):
        for row in _most_changed(rows, group):
            more = "more" if row.after is not None and row.after > (row.before or 0) else "less"
            yield f"{row.name}: {more}, {row.say(row.before)} to {row.say(row.after)}."
    if a.run.observation.hardware != b.run.observation.hardware:
        yield "They ran on different hardware: ratios are of machines as much as of programs."


def _most_changed(rows: tuple[Row, ...], group: str) -> list[Row]:
    """The three whose ratio is furthest from one, in the table's order."""
    changed = [
        (abs(math.log(row.ratio)), row)
        for row in rows
        if row.group == group and row.ratio and abs(row.ratio - 1) > ALIKE
    ]
    kept = [row for _, row in sorted(changed, key=lambda pair: -pair[0])[:TOLD]]
    return [row for row in rows if row in kept]


def _speed(a: Measures, b: Measures) -> str:
    if a.seconds is None or b.seconds is None:
        which = [name for name, m in (("A", a), ("B", b)) if m.seconds is None]
        return f"No step was recorded in {' and '.join(which)}: speeds cannot be compared."
    both = f"{seconds_text(b.seconds)} a step where A takes {seconds_text(a.seconds)}"
    ratio = a.seconds / b.seconds
    if abs(ratio - 1) <= ALIKE:
        return f"Both are as fast: B takes {both}."
    if ratio > 1:
        return f"B is {ratio:.2f} times as fast as A: {both}."
    return f"B is slower, {1 / ratio:.2f} times the time: {both}."


def _moved_phases(rows: tuple[Row, ...], whole: float) -> Iterator[str]:
    """Phases by how much of the difference they are."""
    moved = []
    for row in rows:
        if row.group == "phase":
            delta = (row.after or 0.0) - (row.before or 0.0)
            if abs(delta) > ALIKE * whole:
                moved.append((delta, row))
    for delta, row in sorted(moved, key=lambda pair: -abs(pair[0]))[:TOLD]:
        way = "more" if delta > 0 else "less"
        first, then = (NONE_AT_ALL if v is None else row.say(v) for v in (row.before, row.after))
        yield f"{capital(row.name)} takes {seconds_text(abs(delta))} {way}: {first} to {then}."


def comparison_json(a: Measures, b: Measures, made: Comparison) -> dict[str, Any]:
    """The frozen form that programs read."""
    return {
        "runs": [
            {"verdict": verdict(m), "seconds": m.seconds, "steps": len(m.steps)} for m in (a, b)
        ],
        "rows": [
            {
                "group": row.group, "name": row.name, "unit": row.unit, "before": row.before,
                "after": row.after, "ratio": row.ratio, "judged": row.judged,
            }
            for row in made.rows
        ],
        "words": list(made.words),
    }  # fmt: skip
