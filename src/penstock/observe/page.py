"""The parts of a run's page, top down. Room: show."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.observe import page_plots
from penstock.observe.errors import ObserveError
from penstock.observe.findings import MUCH, WORTH_SAYING, Finding, find
from penstock.observe.labels import (
    NONE,
    capital,
    link_title,
    list_of,
    memory_title,
    moved_text,
    nbytes_text,
    percent,
    rate_text,
    resource_name,
    seconds_text,
    tidy,
    together,
)
from penstock.observe.markup import colour_of, data_block, table, tag, text
from penstock.observe.measures import Measures, measure
from penstock.observe.page_plots import shown_window, wide_window
from penstock.observe.peaks import Peak
from penstock.observe.plots import Phases, Plot, draw, plot_data
from penstock.observe.steps import UNNAMED, settled
from penstock.observe.timeline import choices, draw_timeline, drawn_step, timeline_data
from penstock.observe.usage import GPU, mean

MANY = 6
"""Pieces of a bar, after which the small ones are one."""

LEVEL_WORDS = {"bad": "Bad", "warn": "Costs", "note": "Note"}


class PageSection(NamedTuple):
    """Of a bar."""

    name: str
    seconds: float
    class_: str


def verdict(m: Measures) -> str:
    """The run in one sentence: what bound the step, and by how much."""
    if m.seconds is None:
        return "No step was recorded"
    bound = m.bound
    if bound.resource is None:
        return f"A step took {seconds_text(m.seconds)}; nothing tells what bound it"
    name = capital(resource_name(bound.resource, m))
    if bound.holds:
        return f"{name} bound the step: busy {percent(bound.share)} of {seconds_text(m.seconds)}"
    return (
        f"Nothing was busy throughout: {resource_name(bound.resource, m)}, the busiest, worked "
        f"{percent(bound.share)} of {seconds_text(m.seconds)}"
    )


def under_verdict(m: Measures) -> list[str]:
    """What else belongs to the one sentence: who came second, what was planned."""
    said = []
    if m.bound.runner_up is not None and m.bound.second >= WORTH_SAYING:
        said.append(f"Next is {resource_name(m.bound.runner_up, m)}, {percent(m.bound.second)}.")
    if m.bound.resource is not None and not m.bound.exact:
        said.append("By samples: no copy or kernel was recorded one by one.")
    if m.waits and m.floor is not None and m.bound.share < 0.95:
        least = seconds_text(m.floor)
        said.append(f"No order of what was recorded makes a step shorter than {least}.")
    planned = m.run.observation.planned
    if planned is not None and planned.step_seconds is not None:
        by = f", bound by {resource_name(planned.bound_by, m)}" if planned.bound_by else ""
        said.append(f"Planned: {seconds_text(planned.step_seconds)} a step{by}.")
    return said


def headline(m: Measures, phases: Phases) -> str:
    lead = tag("p", text(" ".join(under_verdict(m))), class_="lead")
    return tag("h1", text(together(verdict(m)))) + lead + _tiles(m) + bars(m, phases)


def _tiles(m: Measures) -> str:
    steps = settled(m.steps)
    tiles: list[tuple[str, str, str]] = []
    if m.seconds is not None:
        slow = sorted(step.seconds for step in steps)[int(0.9 * (len(steps) - 1))]
        of = f"median of {len(steps)}; 9 in 10 within {seconds_text(slow)}"
        tiles.append(("A step", seconds_text(m.seconds), of))
    if GPU in m.busy:
        tiles.append((capital(resource_name(GPU, m)), percent(m.busy[GPU]), "of a step"))
    if m.hidden is not None and m.exposed is not None and m.pcie_nbytes >= MUCH:
        exposed = f"{seconds_text(m.exposed)} a step is not"
        tiles.append(("Copies hidden", percent(m.hidden), exposed))
    for key in ("gpu0.allocated", "gpu0.used", "host.rss"):
        peak = next((p for p in m.peaks if p.key == key and p.measured is not None), None)
        if peak is not None and not (key == "gpu0.used" and "gpu0.allocated" in m.memory):
            where = tidy(peak.phase or "at its peak", 30)
            where = f"in {where}" if peak.phase and peak.step is not None else where
            tiles.append((memory_title(key), nbytes_text(peak.measured), where))
    made = (
        tag("div", tag("dt", text(a)), tag("dd", tag("b", text(b)), tag("span", text(c))))
        for a, b, c in tiles
    )
    return tag("dl", "".join(made), class_="tiles") if tiles else ""


def bars(m: Measures, phases: Phases) -> str:
    """Where a step's time goes: by what the GPU waited for, and by phase."""
    made = ""
    if m.waits:
        whole = mean([use.step.seconds for use in m.uses])
        pieces = [PageSection(resource_name(GPU, m), m.busy[GPU] * whole, "c0")]
        for names, seconds in m.waits.items():
            what = list_of([resource_name(n, m) for n in names]) if names else "nothing recorded"
            class_ = f"c{colour_of(names[0]) if len(names) == 1 else 7}" if names else "none"
            pieces.append(PageSection(f"waited: {what}", seconds, class_))
        title = "What the GPU did" if m.run.observation.hardware.gpus else "Compute"
        made += _bar(title, pieces)
    if m.phases:
        pieces = [
            PageSection(
                tidy(name, 40), seconds, "none" if name == UNNAMED else f"s{phases.place(name) % 4}"
            )
            for name, seconds in m.phases.items()
        ]
        made += _bar("Phases", pieces)
    return made


def _bar(title: str, pieces: Sequence[PageSection]) -> str:
    """A bar and its list, which says the same in words."""
    whole = sum(piece.seconds for piece in pieces)
    kept = [piece for piece in pieces if piece.seconds >= 0.005 * whole]
    if len(kept) > MANY:
        rest = sum(piece.seconds for piece in kept[MANY - 1 :])
        kept = [*kept[: MANY - 1], PageSection("all others", rest, "c5")]
    bar, items = "", ""
    for name, seconds, class_ in kept:
        label = tag("i", text(name)) if seconds > 0.12 * whole else ""
        style = f"flex:{seconds / whole:.4f} 0 0"
        bar += tag("span", label, class_=class_, style=style, title=tidy(name, 80))
        told = f"{name} {seconds_text(seconds)}, {percent(seconds / whole)}"
        items += tag("li", tag("span", class_=f"dot {class_}"), text(told))
    spoken = "; ".join(f"{name} {percent(s / whole)}" for name, s, _ in kept)
    drawn = tag("div", bar, class_="bar", role="img", aria_label=f"{title}: {spoken}")
    return tag("h3", text(f"{title}, seconds a step")) + drawn + tag("ul", items, class_="legend")


def findings_list(findings: Sequence[Finding]) -> str:
    if not findings:
        return tag("p", "Nothing stands out.")
    items = ""
    for finding in findings:
        advice = tag("span", text(finding.advice), class_="advice") if finding.advice else ""
        level = tag("b", LEVEL_WORDS[finding.level], class_=f"level-{finding.level}")
        items += tag("li", level, tag("span", tag("span", text(capital(finding.text))), advice))
    return tag("ul", items, class_="findings")


def overlap_table(m: Measures) -> str:
    rows = []
    planned = m.run.observation.planned
    for link, use in m.links.items():
        said = planned.links.get(link) if planned is not None else None
        rows.append((
            link_title(link),
            moved_text(use.nbytes) if use.exact else f"about {moved_text(use.nbytes)}",
            moved_text(said) if said is not None else NONE,
            seconds_text(use.busy) if use.busy is not None else NONE,
            percent(use.hidden / use.busy) if use.busy and use.hidden is not None else NONE,
            rate_text(use.rate),
            percent(use.rate / use.ceiling) if use.ceiling else NONE,
        ))  # fmt: skip
    for link, said in planned.links.items() if planned is not None else ():
        moved = m.carried(link)
        if link not in m.links and moved is not None:  # a disk, both ways
            both = f"{link_title(link)}, both ways"
            rows.append((both, moved_text(moved), moved_text(said), NONE, NONE, NONE, NONE))
    head = ("link", "a step", "planned", "busy", "hidden", "rate", "of ceiling")
    caption = "Links, per step. Hidden: the share of its busy time in which compute went on"
    return table(head, rows, caption=caption) if rows else ""


def peak_table(m: Measures) -> str:
    rows = [
        (
            memory_title(peak.key),
            nbytes_text(peak.planned),
            nbytes_text(peak.measured),
            percent(peak.measured / peak.planned) if peak.planned and peak.measured else NONE,
            nbytes_text(peak.budget if peak.budget is not None else peak.capacity),
            _first_in(peak),
        )
        for peak in m.peaks
    ]
    head = ("memory", "planned", "measured", "of plan", "budget or size", "first in")
    return table(head, rows, caption="Peaks over the whole run") if rows else ""


def _first_in(peak: Peak) -> str:
    phase = tidy(peak.phase or NONE, 30)
    return phase if peak.step is None else f"step {peak.step}, {phase}"


def phase_table(m: Measures) -> str:
    whole = sum(m.phases.values())
    rows = [(tidy(name, 40), seconds_text(s), percent(s / whole)) for name, s in m.phases.items()]
    return table(("phase", "a step", "share"), rows, caption="Phases, mean") if rows else ""


def about(m: Measures) -> str:
    """What ran on what, how it ended, and what is missing."""
    told, hardware = m.run.observation, m.run.observation.hardware
    gpus = [f"{g.name} ({nbytes_text(g.nbytes)})" if g.nbytes else g.name for g in hardware.gpus]
    nodes = [f"{n.id}: {n.kind}, {nbytes_text(n.nbytes)}" for n in hardware.nodes]
    rows = [
        ("Command", shlex.join(told.command) or NONE),
        ("Began", told.began),
        ("Ended", _ending(m)),
        ("GPUs", ", ".join(gpus) or "none"),
        ("CPU", f"{hardware.cpu_name} ({hardware.cpus} CPUs)" if hardware.cpus else NONE),
        ("Memory nodes", ", ".join(nodes) or NONE),
        ("Disks", ", ".join(hardware.disks) or NONE),
        ("Recorded", f"{told.mode}, a sample every {seconds_text(told.interval)}: "
                     f"{len(m.run.samples):,} samples, {len(m.run.phases):,} phases, "
                     f"{len(m.run.events):,} events, {len(m.steps):,} steps"),
        ("Cost of recording", NONE if told.overhead is None else f"{told.overhead:.2%} of a core"),
    ]  # fmt: skip
    pairs = "".join(tag("dt", text(name)) + tag("dd", text(value)) for name, value in rows)
    notes = "".join(tag("li", text(note)) for note in missing(m))
    listed = tag("h3", "What is missing") + tag("ul", notes) if notes else ""
    return tag("dl", pairs, class_="about") + _processes(m) + listed


def _ending(m: Measures) -> str:
    told = m.run.observation
    if told.ended is None:
        return "not said: cut off, or still going on"
    code = f", exit code {told.exit_code}" if told.exit_code is not None else ""
    return f"after {seconds_text(told.ended)}, by {told.ended_by or 'itself'}{code}"


def missing(m: Measures) -> list[str]:
    """What the page cannot show, and why."""
    run = m.run
    said = [tidy(note, 400) for note in run.notes]
    if not run.samples:
        said.append("no samples: memory over time is not shown")
    if not m.steps:
        said.append("no steps: figures per step are not shown")
    if not run.events:
        said.append("no events: overlap, waiting and the time line are not shown")
    elif not m.uses:
        said.append("the events belong to no step that was kept")
    if not run.observation.hardware.gpus:
        said.append("no GPU was there")
    return list(dict.fromkeys(said))


def _processes(m: Measures) -> str:
    if len(m.run.ranks) < 2:
        return ""
    rows = []
    for name, run in m.run.ranks.items():
        own = measure(run)
        most = {peak.key: peak.measured for peak in own.peaks}
        rows.append((name, seconds_text(own.seconds), nbytes_text(most.get("gpu0.allocated")),
                     nbytes_text(most.get("host.rss"))))  # fmt: skip
    head = ("process", "a step", "GPU, tensors", "host")
    return table(head, rows, caption="Processes; the page shows the first that has phases")


# --------
# A run as one page: no network, readable without a script. Room: show.

_HERE = Path(__file__).parent


def page(m: Measures) -> str:
    """All of report.html."""
    phases = phases_of(m)
    wide, one = wide_window(m), shown_window(m)
    memory = page_plots.memory_plots(m, one) if one else []
    traffic = page_plots.traffic_plots(m, one) if one else []
    load = page_plots.load_plot(m, wide) if wide else None
    whole = page_plots.whole_run_plots(m)
    steps = {why: drawn_step(step, m.run.events) for why, step in choices(m).items()}
    body = tag("header", _eyebrow(m), headline(m, phases))
    body += section("Findings", findings_list(find(m)))
    body += section(
        f"Memory, {one.title}" if one else "Memory",
        _drawn(memory, phases),
        controls=tools(phases),
    )
    busy = _drawn([*traffic, *([load] if load else [])], phases)
    body += section(f"Traffic, {one.title}" if one else "Traffic", busy)
    body += section("Overlap", overlap_table(m))
    body += section("Time line", _timeline(steps, phases))
    body += section("Peaks", peak_table(m), phase_table(m))
    body += section("The whole run", _drawn(whole, phases))
    body += section("About this run", about(m))
    data: dict[str, Any] = {
        "phases": [name for _, name in phases.shown()],
        "plots": {plot.id: plot_data(plot) for plot in (*memory, *traffic, *whole)},
        "steps": [timeline_data(drawn, why, phases) for why, drawn in steps.items()],
    }
    if load is not None:
        data["plots"][load.id] = plot_data(load)
    return document(verdict(m), body, data)


def phases_of(m: Measures) -> Phases:
    named = [phase.name for phase in m.run.phases]
    return Phases([*m.phases, *named, *(event.phase for event in m.run.events if event.phase)])


def section(title: str, *inner: str, controls: str = "") -> str:
    """A part with a heading, or nothing where there is nothing in it."""
    if not any(inner):
        return ""
    return tag("section", tag("h2", text(title)), controls, *inner)


def _eyebrow(m: Measures) -> str:
    command = " ".join(m.run.observation.command)
    return tag("p", text(tidy(f"Penstock report · {command or 'an observed run'}", 160)),
               class_="eyebrow")  # fmt: skip


def _drawn(plots: list[Plot], phases: Phases) -> str:
    made = "".join(draw(plot, phases) for plot in plots)
    return tag("div", made, class_="plots") if made else ""


def tools(phases: Phases) -> str:
    """Controls that need the script, which shows them."""
    zoom = "".join(
        tag("button", sign, type="button", data_do=do, title=say, aria_label=say)
        for do, sign, say in (
            ("in", "+", "Zoom in"), ("out", "\u2212", "Zoom out"), ("left", "\u2190", "Earlier"),
            ("right", "\u2192", "Later"), ("all", "All", "Show all of it"),
        )
    )  # fmt: skip
    toggles = "".join(
        tag("button", text(name), type="button", data_phase=at, aria_pressed="true",
            class_=f"toggle s{at % 4}")
        for at, name in phases.shown()
    )  # fmt: skip
    hint = "Drag over a plot to zoom; click it, then use the wheel, + \u2212 0 and the arrow keys."
    return tag(
        "div",
        tag("div", zoom, class_="group", role="group", aria_label="Zoom"),
        tag("div", toggles, class_="group", role="group", aria_label="Phases to show"),
        tag("p", hint, class_="hint"),
        class_="tools", hidden="hidden",
    )  # fmt: skip


def _timeline(steps: dict[str, Any], phases: Phases) -> str:
    if not steps:
        return ""
    options = "".join(
        tag("option", text(f"step {drawn.step.number} ({why})"), value=at)
        for at, (why, drawn) in enumerate(steps.items())
    )
    chosen = tag("label", "Show ", tag("select", options, id="step"), class_="choose tools",
                 hidden="hidden")  # fmt: skip
    return chosen + draw_timeline(next(iter(steps.values())), phases)


def document(title: str, body: str, data: object) -> str:
    """The page around it all. Only the script whose digest is named may run, and nothing may be
    fetched from anywhere."""
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"base-uri 'none'; form-action 'none'"
    )
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{style}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        f"<main>{body}</main>\n{data_block(data)}\n<script>{script}</script>\n</body></html>\n"
    )


# --------
# A run's report as a file and as JSON. Room: show.

REPORT_FILE = "report.html"


def write_page(html: str, path: Path) -> None:
    """Whole or not at all: a reader never finds half a page."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe is written to, not replaced; a directory says so itself.
            path.write_text(html, encoding="utf-8", errors="replace")
            return
        draft.write_text(html, encoding="utf-8", errors="replace")
        os.replace(draft, path)
    except OSError as refused:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ObserveError(
            "",
            f"cannot be written ({refused.strerror}); name another place with --out",
            where=str(path),
        ) from None


def report_json(m: Measures, findings: Sequence[Finding], path: Path) -> dict[str, Any]:
    """The frozen form that programs read."""
    return {
        "report": str(path),
        "verdict": verdict(m),
        "steps": len(m.steps),
        "step_seconds": m.seconds,
        "bound_by": m.bound.resource,
        "bound_share": m.bound.share,
        "phases": dict(m.phases),
        "busy": dict(m.busy),
        "waits": [{"for": list(names), "seconds": s} for names, s in m.waits.items()],
        "hidden": m.hidden,
        "exposed_seconds": m.exposed,
        "links": {
            name: {
                "nbytes": use.nbytes, "busy_seconds": use.busy, "hidden_seconds": use.hidden,
                "rate": use.rate, "ceiling": use.ceiling, "exact": use.exact,
            }
            for name, use in m.links.items()
        },
        "peaks": {
            peak.key: {"planned": peak.planned, "measured": peak.measured, "budget": peak.budget}
            for peak in m.peaks
        },
        "findings": [
            {"kind": f.kind, "level": f.level, "text": f.text, "seconds": f.seconds}
            for f in findings
        ],
        "missing": missing(m),
    }  # fmt: skip
