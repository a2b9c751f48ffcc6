"""`penstock data show`. Room: show.

Functions ready for typer; `cli.py` gives them their names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from penstock.data import TokenDataset

data_app = typer.Typer(help="Training data: what will be trained.", no_args_is_help=True)

Option = typer.Option


@data_app.callback()
def data() -> None:
    """Training data: what will be trained."""


@data_app.command("show")
def show(
    file: Annotated[
        list[str], typer.Argument(help="Data: .jsonl, .txt, .parquet, directories or hub ids.")
    ],
    model: Annotated[str, Option(help="Whose tokenizer: a directory or a hub id.")],
    context: Annotated[int, Option(help="Tokens in a row.", min=2)] = 4096,
    count: Annotated[int, Option(help="Examples to print.", min=0)] = 3,
    overlong: Annotated[
        Literal["truncate", "drop", "split"], Option(help="What to do with longer documents.")
    ] = "truncate",
    skip_bad_lines: Annotated[
        bool, Option("--skip-bad-lines", help="Leave out lines that are no examples.")
    ] = False,
    cache: Annotated[Path | None, Option(help="Where tokens are kept.")] = None,
    revision: Annotated[str | None, Option(help="Of the model on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run the tokenizer's own code.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print JSON for programs, nothing else.")
    ] = False,
) -> None:
    """Print examples with trained and masked tokens told apart, and count what packing does."""
    from penstock.data import load_tokenizer
    from penstock.data import show as showing

    tokenizer = load_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
    dataset = _open(file, tokenizer, cache, skip=skip_bad_lines, quiet=as_json)
    packed = dataset.pack(context, overlong=overlong)
    if as_json:
        print(json.dumps(showing.as_json(dataset, packed, count)))
        return
    console = Console(highlight=False)
    showing.render_examples(dataset, count, console)
    showing.render_counts(dataset, packed, console)


def _open(
    file: list[str], tokenizer: object, cache: Path | None, *, skip: bool, quiet: bool
) -> TokenDataset:
    """The dataset, under a progress bar on standard error where there is a terminal."""
    from penstock.data import open_dataset

    console = Console(stderr=True, highlight=False)
    hidden = quiet or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("looking", total=None)

        def tell(done: int, total: int, what: str) -> None:
            if total:
                bar.update(task, completed=done, total=total, description=what)
            elif not quiet:
                console.print(what, markup=False)

        return open_dataset(file, tokenizer, cache_dir=cache, skip_bad_lines=skip, tell=tell)
