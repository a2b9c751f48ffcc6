"""`penstock compare`: compare two recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.output import AsJson, print_json


def compare_command(
    before: Annotated[Path, typer.Argument(help="Directory of a recorded run, shown as A.")],
    after: Annotated[Path, typer.Argument(help="Directory of another recorded run, shown as B.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the comparison as HTML.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two recorded runs: steps, phases, links, overlap and memory peaks."""
    from penstock.observe.compare import compare, comparison_json
    from penstock.observe.compare_page import compare_page
    from penstock.observe.measures import measure
    from penstock.observe.page import write_page
    from penstock.observe.run_files import read_run

    measures = measure(read_run(before)), measure(read_run(after))
    comparison = compare(*measures)
    if out is not None:
        write_page(compare_page((str(before), str(after)), measures, comparison), out)
    if as_json:
        print_json(comparison_json(*measures, comparison))
        return
    table = Table("", "A", "B", "B over A", "", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in comparison.rows:
        cells = (row.name, row.say(row.before), row.say(row.after), row.change, row.judged)
        table.add_row(*(Text(cell) for cell in cells))
    console = Console(highlight=False)
    console.print(Text(f"A: {before}\nB: {after}\n"), soft_wrap=True)
    console.print(table)
    console.print()
    for sentence in comparison.words:
        console.print(Text(sentence))
    if out is not None:
        console.print(Text(f"{out} written"), soft_wrap=True)
