"""Write the report of a training that was not recorded: its losses and other metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.observe.labels import number_text, seconds_text, shorten
from penstock.observe.markup import prose, tag, text
from penstock.observe.page import document, draw_plots, section, tools
from penstock.observe.plots import PhaseIndex, plot_data
from penstock.observe.training_curves import TrainingCurves

HOW_TO_RECORD = (
    "Memory and time were not recorded. To see where they go, train with `--profile 20`; with "
    "`--resume`, the next 20 steps of this run are recorded."
)


def training_page(curves: TrainingCurves, name: str) -> str:
    """Return the whole page."""
    phases, plots = PhaseIndex([]), [*curves.loss_plots(), *curves.other_plots()]
    eyebrow = tag("p", text(shorten(f"Penstock report · {name}")), class_="eyebrow")
    lead = tag("p", prose(HOW_TO_RECORD), class_="lead")
    title = training_verdict(curves)
    body = tag("header", eyebrow, tag("h1", text(title)), lead)
    body += section("Training", draw_plots(plots, phases), controls=tools(phases))
    data = {"phases": [], "plots": {plot.id: plot_data(plot) for plot in plots}, "steps": []}
    return document(title, body, data)


def training_verdict(curves: TrainingCurves) -> str:
    """Return the training in one sentence."""
    points = curves.loss or curves.evaluation
    what = "Training loss" if curves.loss else "Evaluation loss"
    first, last = points[0], points[-1]
    sentence = f"{what} from {number_text(first[1])} to {number_text(last[1])}"
    sentence += f" in {len(points):,} steps" if len(points) > 1 else f" in step {last[0]:,.0f}"
    if curves.step_seconds is not None:
        sentence += f" of {seconds_text(curves.step_seconds)}"
    return sentence


def training_json(curves: TrainingCurves, path: Path) -> dict[str, Any]:
    """Return the report for programs, with those keys of a recorded run's that are known."""
    return {
        "report": str(path),
        "verdict": training_verdict(curves),
        "steps": len(curves.loss),
        "step_seconds": curves.step_seconds,
        "losses": curves.losses,
        "findings": [],
        "missing": [HOW_TO_RECORD],
    }
