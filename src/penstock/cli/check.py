"""`penstock check`: verify a run, a checkpoint or a model on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.output import EXIT_ERROR, AsJson, print_json, printable, progress_bar
from penstock.units import format_bytes


def check_command(
    directory: Annotated[
        Path,
        typer.Argument(help="Output directory of a run, a checkpoint, or a model.", exists=True),
    ],
    as_json: AsJson = False,
) -> None:
    """Read a run, checkpoint or model, and report everything that is damaged.

    Exit code 0 if nothing is damaged, 1 otherwise. Nothing is changed.
    """
    from penstock.train.check import check_directory

    with progress_bar("checking", quiet=as_json) as progress:
        report = check_directory(directory, progress)
    if as_json:
        print_json(report.to_json())
    else:
        plain: Any = {"box": None, "pad_edge": False}
        table = Table("directory", "step", "files", "size", "checksums", "result", **plain)
        for part in report.parts:
            table.add_row(
                printable(os.path.relpath(part.path, directory)),
                "" if part.step is None else str(part.step),
                str(part.files),
                format_bytes(part.nbytes),
                "yes" if part.has_checksums else "none",
                "damaged" if part.problems else "intact",
            )
        Console().print(table)
        for problem in report.problems:
            print(f"damaged: {printable(problem)}")
        for note in report.notes:
            print(f"note: {printable(note)}")
        print(report.verdict)
    if report.problems:
        raise typer.Exit(EXIT_ERROR)
