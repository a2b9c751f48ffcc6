"""A run as one page: no network, readable without a script. Room: show."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from penstock.observe import panels, sections
from penstock.observe.findings import find
from penstock.observe.markup import data_block, tag, text
from penstock.observe.measures import Measures
from penstock.observe.plots import Phases, Plot, draw, plot_data
from penstock.observe.timeline import choices, draw_timeline, drawn_step, timeline_data
from penstock.observe.windows import shown_window, wide_window
from penstock.observe.words import tidy

_HERE = Path(__file__).parent


def page(m: Measures) -> str:
    """All of report.html."""
    phases = phases_of(m)
    wide, one = wide_window(m), shown_window(m)
    memory = panels.memory_plots(m, one) if one else []
    traffic = panels.traffic_plots(m, one) if one else []
    load = panels.load_plot(m, wide) if wide else None
    whole = panels.whole_run_plots(m)
    steps = {why: drawn_step(step, m.run.events) for why, step in choices(m).items()}
    body = tag("header", _eyebrow(m), sections.headline(m, phases))
    body += section("Findings", sections.findings_list(find(m)))
    body += section(
        f"Memory, {one.title}" if one else "Memory",
        _drawn(memory, phases),
        controls=tools(phases),
    )
    busy = _drawn([*traffic, *([load] if load else [])], phases)
    body += section(f"Traffic, {one.title}" if one else "Traffic", busy)
    body += section("Overlap", sections.overlap_table(m))
    body += section("Time line", _timeline(steps, phases))
    body += section("Peaks", sections.peak_table(m), sections.phase_table(m))
    body += section("The whole run", _drawn(whole, phases))
    body += section("About this run", sections.about(m))
    data: dict[str, Any] = {
        "phases": [name for _, name in phases.shown()],
        "plots": {plot.id: plot_data(plot) for plot in (*memory, *traffic, *whole)},
        "steps": [timeline_data(drawn, why, phases) for why, drawn in steps.items()],
    }
    if load is not None:
        data["plots"][load.id] = plot_data(load)
    return document(sections.verdict(m), body, data)


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
