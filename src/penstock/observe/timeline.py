"""Draw one step as boxes on tracks: what ran when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.observe.intervals import total_length, union
from penstock.observe.labels import percent, seconds_text, shorten
from penstock.observe.markup import colour_of, details, number, table, tag, text
from penstock.observe.measures import Measures
from penstock.observe.plots import WIDTH, PhaseIndex, phase_band, time_labels
from penstock.observe.records import Event
from penstock.observe.steps import Step, steps_with_events, without_warmup

MAX_BOXES = 1500
"""Number of boxes drawn for one step. Boxes that are too close together are merged."""

LANE_HEIGHT = 24
FIRST_TRACKS = ("gpu", "h2d", "d2h", "cpu sweep", "ranks")
MAX_TRACKS = 24


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
class StepDrawing:
    """One step, ready to be drawn."""

    step: Step
    tracks: tuple[str, ...]
    boxes: tuple[Box, ...]
    events: int
    busy: tuple[float, ...]
    """Busy seconds of each track."""


def selectable_steps(m: Measures) -> dict[str, Step]:
    """Return the steps that the timeline can show, each with the reason to look at it."""
    kept = steps_with_events(m.steps, m.run.events)
    if not kept:
        return {}
    steady = without_warmup(kept)
    typical = m.shown if m.shown in kept else steady[0]
    assert typical is not None
    candidates = {
        "typical": typical,
        "first": kept[0],
        "slowest": max(steady, key=lambda step: step.seconds),
        "fastest": min(steady, key=lambda step: step.seconds),
        "last": kept[-1],
    }
    found: dict[int, tuple[str, Step]] = {}
    for reason, step in candidates.items():
        found.setdefault(step.number, (reason, step))
    return dict(found.values())


def lay_out_step(step: Step, events: Sequence[Event]) -> StepDrawing:
    """Place all events that overlap a step on tracks, and merge boxes if there are too many."""
    inside = [e for e in events if e.end > step.start and e.start < step.end]
    tracks = sorted({event.track for event in inside}, key=_track_order)[:MAX_TRACKS]
    by_track = {track: [e for e in inside if e.track == track] for track in tracks}
    gap, boxes = 0.0, _boxes(by_track, 0.0)
    while len(boxes) > MAX_BOXES:
        gap = 2 * gap or step.seconds / 8000
        boxes = _boxes(by_track, gap)
    spans = (
        union((max(e.start, step.start), min(e.end, step.end)) for e in listed)
        for listed in by_track.values()
    )
    busy = tuple(map(total_length, spans))
    return StepDrawing(step, tuple(tracks), tuple(boxes), len(inside), busy)


def _track_order(track: str) -> tuple[int, str]:
    first = track in FIRST_TRACKS
    return (FIRST_TRACKS.index(track) if first else len(FIRST_TRACKS), track)


def _boxes(by_track: dict[str, list[Event]], gap: float) -> list[Box]:
    """Return one box per event, or fewer: neighbours of the same phase less than `gap` apart are
    merged if one of them is short."""
    found: list[Box] = []
    for at, listed in enumerate(by_track.values()):
        last: Box | None = None
        for e in listed:
            if (
                last is not None
                and gap
                and last.phase == e.phase
                and e.start - last.end < gap
                and (e.seconds < gap or last.end - last.start < gap or last.count > 1)
            ):
                end, moved = max(last.end, e.end), last.nbytes + (e.nbytes or 0)
                last = Box(at, last.start, end, last.name, e.phase, moved, last.count + 1)
                found[-1] = last
            else:
                last = Box(at, e.start, e.end, e.name, e.phase, e.nbytes or 0, 1)
                found.append(last)
    return found


def _x(step: Step, t: float) -> float:
    return min(WIDTH, max(0.0, WIDTH * (t - step.start) / step.seconds))


def draw_timeline(drawing: StepDrawing, phases: PhaseIndex) -> str:
    """Return the figure for the step that is shown first; the page's script draws the others."""
    step, height = drawing.step, LANE_HEIGHT * len(drawing.tracks)
    lanes = "".join(
        tag("rect", x=0, y=LANE_HEIGHT * at, width=WIDTH, height=LANE_HEIGHT - 2, class_="lane")
        for at in range(len(drawing.tracks))
    )
    boxes = "".join(_draw_box(at, box, drawing, phases) for at, box in enumerate(drawing.boxes))
    busy = "; ".join(
        f"{shorten(track, 40)} busy {percent(seconds / step.seconds)}"
        for track, seconds in zip(drawing.tracks, drawing.busy, strict=True)
    )
    svg = tag("svg", tag("g", lanes), tag("g", boxes, class_="boxes"), role="img",
              viewBox=f"0 0 {WIDTH} {height}", preserveAspectRatio="none",
              style=f"height:{height}px",
              aria_label=f"Timeline of step {step.number}: {busy}.")  # fmt: skip
    names = "".join(
        tag("span", text(shorten(track, 24)), title=shorten(track)) for track in drawing.tracks
    )
    band = phase_band(step.segments, lambda t: _x(step, t), phases)
    frame = tag("div", tag("div", names, class_="tracks", aria_hidden="true"),
                tag("div", band, svg, class_="area"), time_labels(0.0, step.seconds),
                class_="frame")  # fmt: skip
    rows = [_row(drawing, at) for at in range(len(drawing.tracks))]
    head = ("track", "events", "busy", "of the step", "longest")
    figures = table(head, rows, caption=f"Step {step.number}, by track")
    return tag("figure", frame, tag("p", class_="readout", aria_live="polite"),
               tag("p", text(merged_note(drawing)), class_="note merged"),
               details("Figures by track", figures),
               class_="plot timeline", id="timeline", data_start=repr(step.start),
               data_end=repr(step.end), data_unit="seconds")  # fmt: skip


def merged_note(drawing: StepDrawing) -> str:
    """Return a note if not every event has its own box."""
    if len(drawing.boxes) >= drawing.events:
        return ""
    return (
        f"{drawing.events:,} events are drawn as {len(drawing.boxes):,} boxes: events that are "
        f"close together are merged."
    )


def _draw_box(at: int, box: Box, drawing: StepDrawing, phases: PhaseIndex) -> str:
    step, colour = drawing.step, colour_of(drawing.tracks[box.track])
    left, right = _x(step, box.start), _x(step, box.end)
    return tag("rect", x=left, y=LANE_HEIGHT * box.track, width=max(0.3, right - left),
               height=LANE_HEIGHT - 2, class_=f"box c{colour} p{phases.number(box.phase)}",
               data_i=at)  # fmt: skip


def _row(drawing: StepDrawing, at: int) -> tuple[str, ...]:
    boxes = [box for box in drawing.boxes if box.track == at]
    longest = max(boxes, key=lambda box: box.end - box.start)
    count = sum(box.count for box in boxes)
    share = percent(drawing.busy[at] / drawing.step.seconds)
    name = f"{shorten(longest.name, 40)}, {seconds_text(longest.end - longest.start)}"
    return drawing.tracks[at], f"{count:,}", seconds_text(drawing.busy[at]), share, name


def timeline_data(drawing: StepDrawing, reason: str, phases: PhaseIndex) -> dict[str, Any]:
    """Return the step for the page's script, with x from 0 to 1000 and names by number."""
    names: dict[str, int] = {}
    step = drawing.step
    boxes = []
    for box in drawing.boxes:
        name = names.setdefault(shorten(box.name, 80), len(names))
        left, right = _x(step, box.start), _x(step, box.end)
        boxes.append([box.track, float(number(left)), float(number(right)), name,
                      phases.number(box.phase), box.nbytes, box.count])  # fmt: skip
    segments = [
        [at, round(_x(step, s.start), 2), round(_x(step, s.end), 2)]
        for s in step.segments
        if (at := phases.number(s.name)) >= 0
    ]
    return {
        "reason": reason, "number": step.number, "start": step.start, "seconds": step.seconds,
        "boxes": boxes,
        "tracks": [shorten(track) for track in drawing.tracks],
        "colours": [colour_of(track) for track in drawing.tracks], "names": list(names),
        "segments": segments, "merged": merged_note(drawing),
    }  # fmt: skip
