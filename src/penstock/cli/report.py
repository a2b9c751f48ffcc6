"""`penstock report`: show where memory and time went in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.output import AsJson, print_json

if TYPE_CHECKING:
    from penstock.observe.training_curves import TrainingCurves


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
    """Write an HTML page that shows where memory and time went in a run, and print a summary.

    For a training without --profile, the page has the losses and the other metrics of each step."""
    from penstock.observe.findings import find
    from penstock.observe.measures import measure
    from penstock.observe.page import (
        REPORT_FILE,
        missing_data,
        page,
        report_json,
        stake,
        verdict,
        verdict_details,
        write_page,
    )
    from penstock.observe.run_files import is_recording, read_run, recording_directory
    from penstock.observe.training_curves import read_curves

    folder = recording_directory(run)
    path = out or folder / REPORT_FILE
    curves = read_curves(folder)
    if curves is not None and not is_recording(folder):
        _report_training(curves, run, path, as_json=as_json)
        return
    measures = measure(read_run(run))
    findings = find(measures)
    write_page(page(measures, curves), path)
    if as_json:
        print_json(report_json(measures, findings, path, curves))
        return
    console = Console(highlight=False)
    console.print(Text(verdict(measures), style="bold"))
    for line in verdict_details(measures):
        console.print(Text(line))
    for finding in findings:
        console.print(Text(f"  {stake(finding)}: {finding.text}"))
        if finding.action:
            console.print(Text(f"      {finding.action}"))
    for note in missing_data(measures):
        console.print(Text(f"  missing: {note}", style="dim"))
    console.print(Text(f"{path} written"), soft_wrap=True)


def _report_training(curves: TrainingCurves, run: Path, path: Path, *, as_json: bool) -> None:
    """Write the page of a training that was not recorded."""
    from penstock.observe.page import write_page
    from penstock.observe.training_page import (
        HOW_TO_RECORD,
        training_json,
        training_page,
        training_verdict,
    )

    write_page(training_page(curves, str(run)), path)
    if as_json:
        print_json(training_json(curves, path))
        return
    console = Console(highlight=False)
    console.print(Text(training_verdict(curves), style="bold"))
    console.print(Text(HOW_TO_RECORD))
    console.print(Text(f"{path} written"), soft_wrap=True)
