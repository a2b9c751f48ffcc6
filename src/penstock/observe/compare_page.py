"""Show two runs side by side on one HTML page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.observe import page, page_plots
from penstock.observe.compare import Comparison
from penstock.observe.findings import find
from penstock.observe.labels import keep_units_together, shorten
from penstock.observe.markup import table, tag, text
from penstock.observe.measures import Measures
from penstock.observe.page import document, phase_index, section, tools
from penstock.observe.page_plots import step_window
from penstock.observe.plots import PhaseIndex, Plot, draw_plot, plot_data


def compare_page(
    names: tuple[str, str], both: tuple[Measures, Measures], comparison: Comparison
) -> str:
    """Return the whole comparison page of runs A and B."""
    phases = PhaseIndex([*phase_index(both[0]).names, *phase_index(both[1]).names])
    sentences = "".join(tag("li", text(sentence)) for sentence in comparison.words[1:])
    titles = [f"{letter}: {shorten(name)}" for letter, name in zip("AB", names, strict=True)]
    plots = _with_common_scale([_plots(letter, m) for letter, m in zip("ab", both, strict=True)])
    body = tag(
        "header",
        tag("p", text("Penstock comparison · " + " · ".join(titles)), class_="eyebrow"),
        tag("h1", text(keep_units_together(comparison.words[0]))),
        tag("ul", sentences) if sentences else "",
    )
    body += section("Figures", _table(comparison))
    heads = [tag("h3", text(title)) for title in titles]
    body += section("Where the time goes", _side_by_side(
        [head + tag("p", text(page.verdict(m)), class_="lead") + page.bars(m, phases)
         for head, m in zip(heads, both, strict=True)]
    ))  # fmt: skip
    figures = [
        head + "".join(draw_plot(plot, phases) for plot in listed)
        for head, listed in zip(heads, plots, strict=True)
    ]
    body += section("Memory and traffic", _side_by_side(figures), controls=tools(phases))
    listed = (page.findings_list(find(m)) or tag("p", "No findings.") for m in both)
    found = [head + each for head, each in zip(heads, listed, strict=True)]
    body += section("Findings", _side_by_side(found))
    about = [head + page.about(m) for head, m in zip(heads, both, strict=True)]
    body += section("About these runs", _side_by_side(about))
    data: dict[str, Any] = {
        "phases": [name for _, name in phases.shown()],
        "plots": {plot.id: plot_data(plot) for listed in plots for plot in listed},
        "steps": [],
    }
    return document(comparison.words[0], body, data)


def _plots(letter: str, m: Measures) -> list[Plot]:
    window = step_window(m)
    if window is None:
        return []
    plots = page_plots.memory_plots(m, window) + page_plots.traffic_plots(m, window)
    return [replace(plot, id=f"{letter}-{plot.id}") for plot in plots]


def _with_common_scale(plots: list[list[Plot]]) -> list[list[Plot]]:
    """Give plots with the same title the same y axis."""
    highest: dict[str, float] = {}
    for plot in (plot for listed in plots for plot in listed):
        highest[plot.title] = max(plot.highest, highest.get(plot.title, 0.0))
    return [[replace(plot, at_least=highest[plot.title]) for plot in listed] for listed in plots]


def _side_by_side(parts: list[str]) -> str:
    return tag("div", "".join(tag("div", part) for part in parts), class_="sides")


def _table(comparison: Comparison) -> str:
    rows = [
        (row.name, row.say(row.before), row.say(row.after), row.change, row.judged or "-")
        for row in comparison.rows
    ]
    head = ("figure", "A", "B", "B / A", "B is")
    return table(head, rows, caption="Figures per step, and peaks over the whole run")
