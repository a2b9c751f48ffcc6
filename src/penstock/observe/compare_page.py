"""Two runs side by side on one page. Room: show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.observe import page, page_plots
from penstock.observe.compare import Comparison
from penstock.observe.findings import find
from penstock.observe.labels import tidy, together
from penstock.observe.markup import table, tag, text
from penstock.observe.measures import Measures
from penstock.observe.page import document, phases_of, section, tools
from penstock.observe.page_plots import shown_window
from penstock.observe.plots import Phases, Plot, draw, plot_data


def compare_page(names: tuple[str, str], both: tuple[Measures, Measures], made: Comparison) -> str:
    """All of compare.html."""
    phases = Phases([*phases_of(both[0]).names, *phases_of(both[1]).names])
    words = "".join(tag("li", text(word)) for word in made.words[1:])
    shown = [f"{letter}: {tidy(name)}" for letter, name in zip("AB", names, strict=True)]
    plots = _alike([_plots(letter, m) for letter, m in zip("ab", both, strict=True)])
    body = tag(
        "header",
        tag("p", text("Penstock comparison · " + " · ".join(shown)), class_="eyebrow"),
        tag("h1", text(together(made.words[0]))),
        tag("ul", words) if words else "",
    )
    body += section("Figures", _table(made))
    heads = [tag("h3", text(name)) for name in shown]
    body += section("Where a step's time goes", _sides(
        [head + tag("p", text(page.verdict(m)), class_="lead") + page.bars(m, phases)
         for head, m in zip(heads, both, strict=True)]
    ))  # fmt: skip
    drawn = [
        head + "".join(draw(plot, phases) for plot in listed)
        for head, listed in zip(heads, plots, strict=True)
    ]
    body += section("Memory and traffic", _sides(drawn), controls=tools(phases))
    found = [page.findings_list(find(m)) for m in both]
    body += section("Findings", _sides([h + f for h, f in zip(heads, found, strict=True)]))
    about = [head + page.about(m) for head, m in zip(heads, both, strict=True)]
    body += section("About these runs", _sides(about))
    data: dict[str, Any] = {
        "phases": [name for _, name in phases.shown()],
        "plots": {plot.id: plot_data(plot) for listed in plots for plot in listed},
        "steps": [],
    }
    return document(made.words[0], body, data)


def _plots(letter: str, m: Measures) -> list[Plot]:
    window = shown_window(m)
    found = (
        page_plots.memory_plots(m, window) + page_plots.traffic_plots(m, window) if window else []
    )
    return [replace(plot, id=f"{letter}-{plot.id}") for plot in found]


def _alike(plots: list[list[Plot]]) -> list[list[Plot]]:
    """Plots of the same thing with the same y axis."""
    most: dict[str, float] = {}
    for plot in (plot for listed in plots for plot in listed):
        most[plot.title] = max(plot.highest, most.get(plot.title, 0.0))
    return [[replace(plot, at_least=most[plot.title]) for plot in listed] for listed in plots]


def _sides(parts: list[str]) -> str:
    return tag("div", "".join(tag("div", part) for part in parts), class_="sides")


def _table(made: Comparison) -> str:
    rows = [
        (row.name, row.say(row.before), row.say(row.after), row.change, row.judged or "-")
        for row in made.rows
    ]
    head = ("figure", "A", "B", "B over A", "B is")
    return table(head, rows, caption="Per step, and peaks over the whole run")
