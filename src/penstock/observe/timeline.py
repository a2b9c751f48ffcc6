"""One step as boxes on tracks: what ran when. Room: show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.observe.intervals import length, union
from penstock.observe.labels import percent, seconds_text, tidy
from penstock.observe.markup import colour_of, folded, number, table, tag, text
from penstock.observe.measures import Measures
from penstock.observe.plots import WIDE, Phases, band, time_labels
from penstock.observe.records import Event
from penstock.observe.steps import Step, recorded, settled

BOXES = 1500
"""Drawn for one step, at most: neighbours too close to be told apart are drawn as one."""

LANE = 24
FIRST = ("gpu", "h2d", "d2h", "cpu sweep")
TRACKS = 24


@dataclass(frozen=True, slots=True)
class Box:
    """One event, or several that are drawn as one."""

    track: int
    start: float
    end: float
    name: str
    phase: str | None
    nbytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """One step, ready to be drawn."""

    step: Step
    tracks: tuple[str, ...]
    boxes: tuple[Box, ...]
    events: int
    busy: tuple[float, ...]
    """Seconds of each track."""


def choices(m: Measures) -> dict[str, Step]:
    """Steps that the time line can show, by why one would look at them."""
    kept = recorded(m.steps, m.run.events)
    if not kept:
        return {}
    steady = settled(kept)
    shown = m.shown if m.shown in kept else steady[0]
    assert shown is not None
    named = {
        "typical": shown,
        "first": kept[0],
        "slowest": max(steady, key=lambda step: step.seconds),
        "fastest": min(steady, key=lambda step: step.seconds),
        "last": kept[-1],
    }
    found: dict[int, tuple[str, Step]] = {}
    for why, step in named.items():
        found.setdefault(step.number, (why, step))
    return dict(found.values())


def drawn_step(step: Step, events: Sequence[Event]) -> Drawn:
    """Boxes of all events that touch the step's time."""
    inside = [e for e in events if e.end > step.start and e.start < step.end]
    tracks = sorted({event.track for event in inside}, key=_order)[:TRACKS]
    by_track = {track: [e for e in inside if e.track == track] for track in tracks}
    apart, boxes = 0.0, _boxes(by_track, 0.0)
    while len(boxes) > BOXES:
        apart = 2 * apart or step.seconds / 8000
        boxes = _boxes(by_track, apart)
    spans = (
        union((max(e.start, step.start), min(e.end, step.end)) for e in listed)
        for listed in by_track.values()
    )
    return Drawn(step, tuple(tracks), tuple(boxes), len(inside), tuple(map(length, spans)))


def _order(track: str) -> tuple[int, str]:
    return (FIRST.index(track) if track in FIRST else len(FIRST), track)


def _boxes(by_track: dict[str, list[Event]], apart: float) -> list[Box]:
    """One a event, or fewer: those of one phase that are less than `apart` from each other join,
    if both are short themselves."""
    found: list[Box] = []
    for at, listed in enumerate(by_track.values()):
        last: Box | None = None
        for e in listed:
            if (
                last is not None
                and apart
                and last.phase == e.phase
                and e.start - last.end < apart
                and (e.seconds < apart or last.end - last.start < apart or last.count > 1)
            ):
                end, moved = max(last.end, e.end), last.nbytes + (e.nbytes or 0)
                last = Box(at, last.start, end, last.name, e.phase, moved, last.count + 1)
                found[-1] = last
            else:
                last = Box(at, e.start, e.end, e.name, e.phase, e.nbytes or 0, 1)
                found.append(last)
    return found


def _x(step: Step, t: float) -> float:
    return min(WIDE, max(0.0, WIDE * (t - step.start) / step.seconds))


def draw_timeline(drawn: Drawn, phases: Phases) -> str:
    """The figure for the step that is shown first; the page's script can draw the others."""
    step, tall = drawn.step, LANE * len(drawn.tracks)
    lanes = "".join(
        tag("rect", x=0, y=LANE * at, width=WIDE, height=LANE - 2, class_="lane")
        for at in range(len(drawn.tracks))
    )
    boxes = "".join(_draw_box(at, box, drawn, phases) for at, box in enumerate(drawn.boxes))
    spoken = "; ".join(
        f"{tidy(track, 40)} busy {percent(busy / step.seconds)}"
        for track, busy in zip(drawn.tracks, drawn.busy, strict=True)
    )
    svg = tag("svg", tag("g", lanes), tag("g", boxes, class_="boxes"), role="img",
              viewBox=f"0 0 {WIDE} {tall}", preserveAspectRatio="none", style=f"height:{tall}px",
              aria_label=f"Time line of step {step.number}: {spoken}.")  # fmt: skip
    names = "".join(tag("span", text(tidy(track, 24)), title=tidy(track)) for track in drawn.tracks)
    shown = band(step.segments, lambda t: _x(step, t), phases)
    frame = tag("div", tag("div", names, class_="tracks", aria_hidden="true"),
                tag("div", shown, svg, class_="area"), time_labels(0.0, step.seconds),
                class_="frame")  # fmt: skip
    rows = [_row(drawn, at) for at in range(len(drawn.tracks))]
    head = ("track", "events", "busy", "of the step", "longest")
    behind = folded("Figures by track", table(head, rows, caption=f"Step {step.number}, by track"))
    return tag("figure", frame, tag("p", class_="readout", aria_live="polite"),
               tag("p", text(fewer(drawn)), class_="note fewer"), behind,
               class_="plot timeline", id="timeline", data_start=repr(step.start),
               data_end=repr(step.end), data_unit="seconds")  # fmt: skip


def fewer(drawn: Drawn) -> str:
    """Said where not every event has a box of its own."""
    joined = len(drawn.boxes) < drawn.events
    told = f"{drawn.events:,} events are drawn as {len(drawn.boxes):,} boxes: close ones as one."
    return told if joined else ""


def _draw_box(at: int, box: Box, drawn: Drawn, phases: Phases) -> str:
    step, colour = drawn.step, colour_of(drawn.tracks[box.track])
    left, right = _x(step, box.start), _x(step, box.end)
    return tag("rect", x=left, y=LANE * box.track, width=max(0.3, right - left), height=LANE - 2,
               class_=f"box c{colour} p{phases.place(box.phase)}",
               data_i=at)  # fmt: skip


def _row(drawn: Drawn, at: int) -> tuple[str, ...]:
    boxes = [box for box in drawn.boxes if box.track == at]
    longest = max(boxes, key=lambda box: box.end - box.start)
    count = sum(box.count for box in boxes)
    share = percent(drawn.busy[at] / drawn.step.seconds)
    what = f"{tidy(longest.name, 40)}, {seconds_text(longest.end - longest.start)}"
    return drawn.tracks[at], f"{count:,}", seconds_text(drawn.busy[at]), share, what


def timeline_data(drawn: Drawn, why: str, phases: Phases) -> dict[str, Any]:
    """For the page's script: x from 0 to 1000, names by number."""
    names: dict[str, int] = {}
    step = drawn.step
    boxes = []
    for box in drawn.boxes:
        name = names.setdefault(tidy(box.name, 80), len(names))
        left, right = _x(step, box.start), _x(step, box.end)
        boxes.append([box.track, float(number(left)), float(number(right)), name,
                      phases.place(box.phase), box.nbytes, box.count])  # fmt: skip
    segments = [
        [at, round(_x(step, s.start), 2), round(_x(step, s.end), 2)]
        for s in step.segments
        if (at := phases.place(s.name)) >= 0
    ]
    return {
        "why": why, "number": step.number, "start": step.start, "seconds": step.seconds,
        "boxes": boxes,
        "tracks": [tidy(track) for track in drawn.tracks],
        "colours": [colour_of(track) for track in drawn.tracks], "names": list(names),
        "segments": segments, "fewer": fewer(drawn),
    }  # fmt: skip
