"""`penstock report` and `penstock compare`. Room: show.

Functions ready for typer; `cli.py` gives them their names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, nothing else.")]


def report_command(
    run: Annotated[Path, typer.Argument(help="The directory of an observed run.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write it.", show_default="RUN/report.html"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page that shows where memory and time went in a run; say the same in short."""
    from penstock.observe.findings import find
    from penstock.observe.measures import measure
    from penstock.observe.page import (
        REPORT_FILE,
        missing,
        page,
        report_json,
        under_verdict,
        verdict,
        write_page,
    )
    from penstock.observe.run_files import read_run

    measures = measure(read_run(run))
    findings = find(measures)
    path = out or run / REPORT_FILE
    write_page(page(measures), path)
    if as_json:
        print(json.dumps(report_json(measures, findings, path), indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    console.print(Text(verdict(measures), style="bold"))
    for line in under_verdict(measures):
        console.print(Text(line))
    for finding in findings:
        console.print(Text(f"  {finding.level}  {finding.text}"))
    for note in missing(measures):
        console.print(Text(f"  missing: {note}", style="dim"))
    console.print(Text(f"{path} written"), soft_wrap=True)


def compare_command(
    before: Annotated[Path, typer.Argument(help="The directory of an observed run: A.")],
    after: Annotated[Path, typer.Argument(help="The one to compare with it: B.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write both as a page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set two observed runs beside each other: steps, phases, links, overlap and peaks."""
    from penstock.observe.compare import compare, comparison_json
    from penstock.observe.compare_page import compare_page
    from penstock.observe.measures import measure
    from penstock.observe.page import write_page
    from penstock.observe.run_files import read_run

    both = measure(read_run(before)), measure(read_run(after))
    made = compare(*both)
    if out is not None:
        write_page(compare_page((str(before), str(after)), both, made), out)
    if as_json:
        print(json.dumps(comparison_json(*both, made), indent=2, allow_nan=False))
        return
    table = Table("", "A", "B", "B over A", "", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in made.rows:
        cells = (row.name, row.say(row.before), row.say(row.after), row.change, row.judged)
        table.add_row(*(Text(cell) for cell in cells))
    console = Console(highlight=False)
    console.print(Text(f"A: {before}\nB: {after}\n"), soft_wrap=True)
    console.print(table)
    console.print()
    for word in made.words:
        console.print(Text(word))
    if out is not None:
        console.print(Text(f"{out} written"), soft_wrap=True)
