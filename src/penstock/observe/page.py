"""Write the report of a run as one HTML page, and as JSON.

The page needs no network and can be read without its script, which only adds zooming, phase toggles
and a cursor. Its sections follow the order of this module: verdict, what to do, plots, tables,
and what ran on what.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.durable_files import PRIVATE, replace_file
from penstock.observe import page_plots
from penstock.observe.errors import ObserveError
from penstock.observe.findings import MIN_NBYTES, SIGNIFICANT, Finding, find
from penstock.observe.labels import (
    NO_VALUE,
    capitalize,
    join_words,
    keep_units_together,
    link_title,
    memory_title,
    moved_text,
    nbytes_text,
    percent,
    rate_text,
    resource_name,
    seconds_text,
    shorten,
)
from penstock.observe.markup import colour_of, data_block, prose, table, tag, text
from penstock.observe.measures import Measures, measure
from penstock.observe.page_plots import step_window, widened_window
from penstock.observe.peers import peer_waits
from penstock.observe.plots import PhaseIndex, Plot, draw_plot, plot_data
from penstock.observe.series import Peak
from penstock.observe.steps import UNNAMED
from penstock.observe.timeline import (
    StepDrawing,
    draw_timeline,
    lay_out_step,
    selectable_steps,
    timeline_data,
)
from penstock.observe.training_curves import TrainingCurves
from penstock.observe.usage import GPU, mean

REPORT_FILE = "report.html"

MAX_BAR_PARTS = 6
"""Number of parts of a bar. If there are more, the smaller ones are joined."""

LEVEL_NAMES = {"bad": "error", "warn": "cost", "note": "note"}

_HERE = Path(__file__).parent


def page(m: Measures, losses: TrainingCurves | None = None) -> str:
    """Return the whole of report.html; `losses` are those of the training, if known."""
    phases = phase_index(m)
    wide, window = widened_window(m), step_window(m)
    memory = page_plots.memory_plots(m, window) if window else []
    traffic = page_plots.traffic_plots(m, window) if window else []
    load = page_plots.load_plot(m, wide) if wide else None
    whole = page_plots.whole_run_plots(m)
    steps = {why: lay_out_step(step, m.run.events) for why, step in selectable_steps(m).items()}
    step = f", {window.title}" if window else ""
    training = losses.loss_plots() if losses is not None else []
    body = tag("header", _eyebrow(m), headline(m, phases))
    body += findings_sections(find(m))
    body += section("Loss", draw_plots(training, phases), controls=tools(PhaseIndex([])))
    body += section(f"Memory{step}", draw_plots(memory, phases), controls=tools(phases))
    busy = draw_plots([*traffic, *([load] if load else [])], phases)
    body += section(f"Traffic{step}", busy)
    body += section("Overlap", overlap_table(m))
    body += section("Timeline", _timeline(steps, phases))
    body += section("Peaks", peak_table(m), phase_table(m))
    body += section("Processes", process_table(m))
    body += section("Whole run", draw_plots(whole, phases))
    body += section("About this run", about(m))
    data: dict[str, Any] = {
        "phases": [name for _, name in phases.shown()],
        "plots": {p.id: plot_data(p) for p in (*training, *memory, *traffic, *whole)},
        "steps": [timeline_data(drawing, why, phases) for why, drawing in steps.items()],
    }
    if load is not None:
        data["plots"][load.id] = plot_data(load)
    return document(verdict(m), body, data)


# The verdict.


def verdict(m: Measures) -> str:
    """Return the run in one sentence: the bottleneck, and how busy it was."""
    if m.seconds is None:
        return "No steps were recorded"
    bottleneck, seconds = m.bottleneck, seconds_text(m.seconds)
    if bottleneck.resource is None:
        return f"Step time {seconds}; the bottleneck is not known"
    name, share = resource_name(bottleneck.resource, m), percent(bottleneck.share)
    if bottleneck.limits_step:
        return f"Bottleneck: {name}, busy for {share} of the {seconds} step"
    return f"No single bottleneck: {name}, the busiest, takes {share} of the {seconds} step"


def verdict_details(m: Measures) -> list[str]:
    """Return the sentences below the verdict: the runner-up, the lower bound and the plan."""
    sentences = []
    bottleneck = m.bottleneck
    if bottleneck.runner_up is not None and bottleneck.second >= SIGNIFICANT:
        name = resource_name(bottleneck.runner_up, m)
        sentences.append(f"The next busiest is {name}, with {percent(bottleneck.second)}.")
    if bottleneck.resource is not None and not bottleneck.exact:
        sentences.append("This is based on samples: copies and kernels were not recorded.")
    if m.waits and m.floor is not None and bottleneck.share < 0.95:
        least = seconds_text(m.floor)
        sentences.append(f"With full overlap, a step would take at least {least}.")
    planned = m.run.observation.planned
    if planned is not None and planned.step_seconds is not None:
        by = f", limited by {resource_name(planned.bound_by, m)}" if planned.bound_by else ""
        sentences.append(f"Planned: {seconds_text(planned.step_seconds)} per step{by}.")
    return sentences


def headline(m: Measures, phases: PhaseIndex) -> str:
    """Return the top of the page: the verdict, the main figures, and where the time goes."""
    lead = tag("p", text(" ".join(verdict_details(m))), class_="lead")
    return tag("h1", text(keep_units_together(verdict(m)))) + lead + _tiles(m) + bars(m, phases)


def _tiles(m: Measures) -> str:
    """Return the main figures: name, value, and what the value refers to."""
    steps = m.own_steps
    tiles: list[tuple[str, str, str]] = []
    if m.seconds is not None:
        slow = sorted(step.seconds for step in steps)[int(0.9 * (len(steps) - 1))]
        detail = f"median of {len(steps)}; 90 % within {seconds_text(slow)}"
        tiles.append(("Step time", seconds_text(m.seconds), detail))
    if GPU in m.busy:
        tiles.append((capitalize(resource_name(GPU, m)), percent(m.busy[GPU]), "of step time"))
    if m.hidden is not None and m.exposed is not None and m.pcie_nbytes >= MIN_NBYTES:
        exposed = f"{seconds_text(m.exposed)} per step not hidden"
        tiles.append(("Copies hidden", percent(m.hidden), exposed))
    for key in ("gpu0.allocated", "gpu0.used", "host.rss"):
        peak = next((p for p in m.peaks if p.key == key and p.measured is not None), None)
        if peak is not None and not (key == "gpu0.used" and "gpu0.allocated" in m.memory):
            tiles.append((memory_title(key), nbytes_text(peak.measured), _tile_moment(peak)))
    items = (
        tag("div", tag("dt", text(a)), tag("dd", tag("b", text(b)), tag("span", text(c))))
        for a, b, c in tiles
    )
    return tag("dl", "".join(items), class_="tiles") if tiles else ""


def _tile_moment(peak: Peak) -> str:
    if not peak.phase:
        return "peak"
    moment = shorten(peak.phase, 30)
    return f"peak, in {moment}" if peak.step is not None else f"peak, {moment}"


class BarPart(NamedTuple):
    """One part of a stacked bar."""

    name: str
    seconds: float
    class_: str


def bars(m: Measures, phases: PhaseIndex) -> str:
    """Return two bars of a step's time: by what the GPU did, and by phase."""
    html = ""
    if m.waits:
        whole = mean([usage.step.seconds for usage in m.usages])
        parts = [BarPart(resource_name(GPU, m), m.busy[GPU] * whole, "c0")]
        for names, seconds in m.waits.items():
            if names:
                name = "idle during " + join_words([resource_name(n, m) for n in names])
                class_ = f"c{colour_of(names[0]) if len(names) == 1 else 7}"
            else:
                recording = min(seconds, m.recording_seconds)
                parts.append(BarPart("the recording itself", recording, "none"))
                name, class_, seconds = "idle, cause not recorded", "none", seconds - recording
            parts.append(BarPart(name, seconds, class_))
        title = "GPU activity" if m.run.observation.hardware.gpus else "Compute"
        html += _bar(title, parts, len(m.usages))
    if m.phases:
        parts = []
        for name, seconds in m.phases.items():
            class_ = "none" if name == UNNAMED else f"phase-part s{phases.colour(name)}"
            parts.append(BarPart(shorten(name, 40), seconds, class_))
        html += _bar("Phases", parts, len(m.own_steps))
    return html


def _bar(title: str, parts: Sequence[BarPart], steps: int) -> str:
    """Return a bar, and a list with the same figures as text: means over a number of steps."""
    whole = sum(part.seconds for part in parts)
    kept = [part for part in parts if part.seconds >= 0.005 * whole]
    if len(kept) > MAX_BAR_PARTS:
        rest = sum(part.seconds for part in kept[MAX_BAR_PARTS - 1 :])
        kept = [*kept[: MAX_BAR_PARTS - 1], BarPart("all others", rest, "c5")]
    bar, items = "", ""
    for name, seconds, class_ in kept:
        label = tag("i", text(name)) if seconds > 0.12 * whole else ""
        style = f"flex:{seconds / whole:.4f} 0 0"
        bar += tag("span", label, class_=class_, style=style, title=shorten(name, 80))
        item = f"{name} {seconds_text(seconds)}, {percent(seconds / whole)}"
        items += tag("li", tag("span", class_=f"dot {class_}"), text(item))
    spoken = "; ".join(f"{name} {percent(s / whole)}" for name, s, _ in kept)
    drawing = tag("div", bar, class_="bar", role="img", aria_label=f"{title}: {spoken}")
    # The step time above is a median, which a few slow steps do not change.
    heading = tag("h3", text(f"{title}, time per step (mean of {steps})"))
    return heading + drawing + tag("ul", items, class_="legend")


# Findings and tables.


def findings_sections(findings: Sequence[Finding]) -> str:
    """Return what to do, most seconds to gain first, and what else the run shows."""
    lead = "Sorted by the seconds per step at stake. Not all of them may be recoverable."
    todo = [finding for finding in findings if finding.action]
    others = [finding for finding in findings if not finding.action]
    if not todo:
        html = section("What to do", tag("p", "Nothing: no finding has a remedy."))
    else:
        html = section("What to do", tag("p", lead, class_="note"), findings_list(todo))
    return html + (section("Also noticed", findings_list(others)) if others else "")


def findings_list(findings: Sequence[Finding]) -> str:
    """Return findings as a list: what is at stake, what to do, and what was seen."""
    if not findings:
        return ""
    items = ""
    for finding in findings:
        at_stake = capitalize(stake(finding))
        level = tag("b", text(keep_units_together(at_stake)), class_=f"level-{finding.level}")
        body = tag("span", prose(finding.action), class_="act") if finding.action else ""
        body += tag("span", prose(capitalize(finding.text)))
        body += tag("span", prose(finding.advice), class_="advice") if finding.advice else ""
        items += tag("li", level, tag("span", body))
    return tag("ul", items, class_="findings")


def stake(finding: Finding) -> str:
    """Return what a finding is about in two words: the time to gain, or how severe it is."""
    if finding.seconds > 0 and finding.level != "bad" and finding.action:
        return f"up to {seconds_text(finding.seconds)}"
    return LEVEL_NAMES[finding.level]


def overlap_table(m: Measures) -> str:
    """Return a table of the links: traffic, plan, and how much was hidden behind compute."""
    rows = []
    planned = m.run.observation.planned
    for link, usage in m.links.items():
        nbytes = planned.links.get(link) if planned is not None else None
        busy, hidden = usage.busy, usage.hidden
        rows.append((
            link_title(link),
            moved_text(usage.nbytes) if usage.exact else f"about {moved_text(usage.nbytes)}",
            moved_text(nbytes) if nbytes is not None else NO_VALUE,
            seconds_text(busy) if busy is not None else NO_VALUE,
            percent(hidden / busy) if busy and hidden is not None else NO_VALUE,
            rate_text(usage.rate),
            percent(usage.rate / usage.ceiling) if usage.ceiling else NO_VALUE,
        ))  # fmt: skip
    for link, nbytes in planned.links.items() if planned is not None else ():
        moved = m.carried(link)
        if link not in m.links and moved is not None:  # a disk, whose plan is for both directions
            title = f"{link_title(link)}, both directions"
            blank = (NO_VALUE,) * 4
            rows.append((title, moved_text(moved), moved_text(nbytes), *blank))
    head = ("link", "per step", "planned", "busy", "hidden", "rate", "of ceiling")
    caption = "Links, per step. Hidden: share of the busy time in which compute was running"
    return table(head, rows, caption=caption) if rows else ""


def peak_table(m: Measures) -> str:
    """Return a table of the peak of each memory."""
    rows = [
        (
            memory_title(peak.key),
            nbytes_text(peak.planned),
            nbytes_text(peak.measured),
            percent(peak.measured / peak.planned) if peak.planned and peak.measured else NO_VALUE,
            nbytes_text(peak.budget if peak.budget is not None else peak.capacity),
            _peak_moment(peak),
        )
        for peak in m.peaks
    ]
    head = ("memory", "planned", "measured", "of plan", "budget or size", "first reached")
    return table(head, rows, caption="Peaks over the whole run") if rows else ""


def _peak_moment(peak: Peak) -> str:
    phase = shorten(peak.phase or NO_VALUE, 30)
    return phase if peak.step is None else f"step {peak.step}, {phase}"


def phase_table(m: Measures) -> str:
    """Return a table of the mean time of each phase."""
    whole = sum(m.phases.values())
    rows = [
        (shorten(name, 40), seconds_text(seconds), percent(seconds / whole))
        for name, seconds in m.phases.items()
    ]
    head = ("phase", "per step", "share")
    return table(head, rows, caption="Phases, mean per step") if rows else ""


# About the run.


def about(m: Measures) -> str:
    """Return what ran on what, how it ended, and which data is missing."""
    observation, hardware = m.run.observation, m.run.observation.hardware
    gpus = [f"{g.name} ({nbytes_text(g.nbytes)})" if g.nbytes else g.name for g in hardware.gpus]
    nodes = [f"{n.id}: {n.kind}, {nbytes_text(n.nbytes)}" for n in hardware.nodes]
    overhead = NO_VALUE
    if observation.overhead is not None:
        overhead = f"{100 * observation.overhead:.2f} % of a core"
    rows = [
        ("Command", shlex.join(observation.command) or NO_VALUE),
        ("Started", observation.began),
        ("Ended", _ending(m)),
        ("GPUs", ", ".join(gpus) or "none"),
        ("CPU", f"{hardware.cpu_name} ({hardware.cpus} CPUs)" if hardware.cpus else NO_VALUE),
        ("Memory nodes", ", ".join(nodes) or NO_VALUE),
        ("Disks", ", ".join(hardware.disks) or NO_VALUE),
        ("Recording", f"{observation.mode}, a sample every {seconds_text(observation.interval)}: "
                      f"{len(m.run.samples):,} samples, {len(m.run.phases):,} phases, "
                      f"{len(m.run.events):,} events, {len(m.steps):,} steps"),
        ("Recording overhead", overhead),
    ]  # fmt: skip
    pairs = "".join(tag("dt", text(name)) + tag("dd", text(value)) for name, value in rows)
    notes = "".join(tag("li", text(note)) for note in missing_data(m))
    listed = tag("h3", "Missing data") + tag("ul", notes) if notes else ""
    return tag("dl", pairs, class_="about") + listed


def _ending(m: Measures) -> str:
    observation = m.run.observation
    if observation.ended is None:
        return "not recorded: the recording was cut off, or is still running"
    code = f", exit code {observation.exit_code}" if observation.exit_code is not None else ""
    ended_by = f" ({observation.ended_by}{code})" if observation.ended_by else code
    return f"after {seconds_text(observation.ended)}{ended_by}"


def missing_data(m: Measures) -> list[str]:
    """Return what the page cannot show, and why."""
    run = m.run
    notes = [shorten(note, 400) for note in run.notes]
    if not run.samples:
        notes.append("no samples: memory over time is not shown")
    if not m.steps:
        notes.append("no steps: figures per step are not shown")
    if not run.events:
        notes.append("no events: overlap, waits and the timeline are not shown")
    elif not m.usages:
        notes.append("the recorded events belong to steps that were not kept")
    if not run.observation.hardware.gpus:
        notes.append("the machine has no GPU")
    return list(dict.fromkeys(notes))


def process_table(m: Measures) -> str:
    """Return a table of the processes, if there are several: their phases and their waits."""
    if len(m.run.ranks) < 2:
        return ""
    measured = {name: measure(run) for name, run in m.run.ranks.items()}
    phases = list(dict.fromkeys(phase for own in measured.values() for phase in own.phases))
    peers, rows = peer_waits(m.run), []
    for name, own in measured.items():
        peaks = {peak.key: peak.measured for peak in own.peaks}
        waits = (None, None) if peers is None else (peers.waited[name], peers.late[name])
        rows.append((name, seconds_text(own.seconds),
                     *(seconds_text(own.phases.get(phase)) for phase in phases),
                     *map(seconds_text, waits), nbytes_text(peaks.get("gpu0.allocated")),
                     nbytes_text(peaks.get("host.rss"))))  # fmt: skip
    head = ("process", "step time", *(shorten(phase, 30) for phase in phases), "waits for peers",
            "others wait for it", "GPU, tensors", "host")  # fmt: skip
    caption = "Processes, with times per step. The other sections show the first that has phases"
    return table(head, rows, caption=caption)


# Parts that the comparison page uses too.


def phase_index(m: Measures) -> PhaseIndex:
    """Number all phases of a run."""
    names = [phase.name for phase in m.run.phases]
    return PhaseIndex([*m.phases, *names, *(e.phase for e in m.run.events if e.phase)])


def section(title: str, *inner: str, controls: str = "") -> str:
    """Return a section with a heading, or nothing if it would be empty."""
    if not any(inner):
        return ""
    return tag("section", tag("h2", text(title)), controls, *inner)


def tools(phases: PhaseIndex) -> str:
    """Return the controls that need the script. They are hidden until it runs."""
    zoom = "".join(
        tag("button", sign, type="button", data_do=do, title=label, aria_label=label)
        for do, sign, label in (
            ("in", "+", "Zoom in"), ("out", "\u2212", "Zoom out"), ("left", "\u2190", "Earlier"),
            ("right", "\u2192", "Later"), ("all", "All", "Show everything"),
        )
    )  # fmt: skip
    choice = "".join(
        tag("button", text(name), type="button", data_phase=at, aria_pressed="true",
            class_=f"toggle s{phases.colour(phases.names[at])}")
        for at, name in phases.shown()
    )  # fmt: skip
    toggles = (
        tag("div", choice, class_="group", role="group", aria_label="Phases to show")
        if choice
        else ""
    )
    hint = "Drag to zoom. Click a plot to use the wheel, + \u2212 0 and the arrow keys."
    return tag(
        "div",
        tag("div", zoom, class_="group", role="group", aria_label="Zoom"),
        toggles,
        tag("p", hint, class_="hint"),
        class_="tools", hidden="hidden",
    )  # fmt: skip


def document(title: str, body: str, data: object) -> str:
    """Return the whole HTML document. Its content security policy allows only our script to run,
    and nothing to be fetched."""
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


def _eyebrow(m: Measures) -> str:
    command = " ".join(m.run.observation.command)
    line = shorten(f"Penstock report · {command or 'an observed run'}", 160)
    return tag("p", text(line), class_="eyebrow")


def draw_plots(plots: Sequence[Plot], phases: PhaseIndex) -> str:
    """Return plots next to each other, as many as the width allows."""
    figures = "".join(draw_plot(plot, phases) for plot in plots)
    return tag("div", figures, class_="plots") if figures else ""


def _timeline(steps: dict[str, StepDrawing], phases: PhaseIndex) -> str:
    if not steps:
        return ""
    options = "".join(
        tag("option", text(f"step {drawing.step.number} ({why})"), value=at)
        for at, (why, drawing) in enumerate(steps.items())
    )
    chooser = tag("label", "Show ", tag("select", options, id="step"), class_="choose tools",
                  hidden="hidden")  # fmt: skip
    return chooser + draw_timeline(next(iter(steps.values())), phases)


# Files.


def write_page(html: str, path: Path) -> None:
    """Write a page atomically: a reader never finds half of it."""
    content = html.encode(errors="replace")
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe must be written to, not replaced. For a directory this raises.
            path.write_bytes(content)
            return
        replace_file(path, content, mode=PRIVATE)
    except OSError as failed:
        raise ObserveError(
            "",
            f"cannot be written ({failed.strerror}); choose another path with --out",
            where=str(path),
        ) from None


def report_json(
    m: Measures, findings: Sequence[Finding], path: Path, curves: TrainingCurves | None = None
) -> dict[str, Any]:
    """Return the report for programs. Its keys are a stable interface."""
    return {
        "report": str(path),
        "verdict": verdict(m),
        "steps": len(m.steps),
        "step_seconds": m.seconds,
        "bound_by": m.bottleneck.resource,
        "bound_share": m.bottleneck.share,
        "phases": dict(m.phases),
        "busy": dict(m.busy),
        "waits": [{"for": list(names), "seconds": s} for names, s in m.waits.items()],
        "hidden": m.hidden,
        "exposed_seconds": m.exposed,
        "links": {
            name: {
                "nbytes": usage.nbytes, "busy_seconds": usage.busy, "hidden_seconds": usage.hidden,
                "rate": usage.rate, "ceiling": usage.ceiling, "exact": usage.exact,
            }
            for name, usage in m.links.items()
        },
        "peaks": {
            peak.key: {"planned": peak.planned, "measured": peak.measured, "budget": peak.budget}
            for peak in m.peaks
        },
        "findings": [
            {"kind": f.kind, "level": f.level, "text": f.text, "action": f.action,
             "seconds": f.seconds}
            for f in findings
        ],
        "losses": curves.losses if curves is not None else {},
        "ranks": _ranks_json(m),
        "missing": missing_data(m),
    }  # fmt: skip


def _ranks_json(m: Measures) -> dict[str, Any]:
    """Return the figures of each process, if there are several."""
    peers, found = peer_waits(m.run), {}
    for name, run in m.run.ranks.items():
        own = measure(run)
        found[name] = {
            "step_seconds": own.seconds,
            "phases": dict(own.phases),
            "peer_wait_seconds": None if peers is None else peers.waited[name],
            "late_seconds": None if peers is None else peers.late[name],
        }
    return found
