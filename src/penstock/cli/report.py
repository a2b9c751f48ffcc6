"""`penstock report`: show where memory and time went in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.output import AsJson, print_json


def report_command(
    run: Annotated[
        Path,
        typer.Argument(
            help="Directory of a recorded run, or the --out of `penstock train --profile`."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write.", show_default="RUN/report.html"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page that shows where memory and time went in a run, and print a summary."""
    from penstock.observe.findings import find
    from penstock.observe.loss_curve import read_loss_curve
    from penstock.observe.measures import measure
    from penstock.observe.page import (
        REPORT_FILE,
        missing_data,
        page,
        report_json,
        verdict,
        verdict_details,
        write_page,
    )
    from penstock.observe.run_files import read_run, recording_directory

    measures = measure(read_run(run))
    findings = find(measures)
    folder = recording_directory(run)
    path = out or folder / REPORT_FILE
    write_page(page(measures, read_loss_curve(folder)), path)
    if as_json:
        print_json(report_json(measures, findings, path))
        return
    console = Console(highlight=False)
    console.print(Text(verdict(measures), style="bold"))
    for line in verdict_details(measures):
        console.print(Text(line))
    for finding in findings:
        console.print(Text(f"  {finding.level}  {finding.text}"))
    for note in missing_data(measures):
        console.print(Text(f"  missing: {note}", style="dim"))
    console.print(Text(f"{path} written"), soft_wrap=True)
