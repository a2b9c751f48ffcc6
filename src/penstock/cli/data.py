"""Examples and counts for people and for programs. Room: show."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from penstock.data.batches import Packed
from penstock.data.dataset import TokenDataset

MOST_TOKENS = 1000
"""Of one example. The rest is counted."""

TRAINED, MASKED = "bold green", "dim"
OPENS, CLOSES = "[+", "+]"
"""Around what is trained, where there are no colours."""


def parts_of(dataset: TokenDataset, number: int) -> list[dict[str, Any]]:
    """One document as runs of trained and masked text."""
    document = dataset[number]
    pairs = zip(document.ids.tolist(), document.trained.tolist(), strict=True)
    runs = groupby(list(pairs)[:MOST_TOKENS], key=lambda pair: pair[1])
    return [
        {"trained": is_trained, "tokens": len(ids), "text": dataset.decode(ids)}
        for is_trained, pairs in runs
        for ids in [[token for token, _ in pairs]]
    ]


def render_examples(dataset: TokenDataset, count: int, console: Console) -> None:
    """The first documents, trained text told from the rest by colour or by signs."""
    has_colour = console.color_system is not None
    opens, closes = ("", "") if has_colour else (OPENS, CLOSES)
    legend = Text()
    legend.append(f"{opens}trained{closes}", TRAINED)
    legend.append("  ")
    legend.append("masked: read, but not trained", MASKED)
    console.print(legend)
    for number in range(min(count, len(dataset))):
        total = len(dataset[number].ids)
        console.rule(f"example {number + 1} of {len(dataset):,}, {total:,} tokens", style="dim")
        line = Text()
        for part in parts_of(dataset, number):
            if part["trained"]:
                line.append(f"{opens}{part['text']}{closes}", TRAINED)
            else:
                line.append(part["text"], MASKED)
        if total > MOST_TOKENS:
            line.append(f" ... {total - MOST_TOKENS:,} more tokens")
        console.print(line)


def render_counts(dataset: TokenDataset, packed: Packed, console: Console) -> None:
    """What there is, and what packing makes of it."""
    counts = packed.counts
    console.rule(style="dim")
    share = 100 * dataset.targets / max(1, dataset.tokens)
    lines = [
        f"{len(dataset):,} documents, {dataset.tokens:,} tokens, "
        f"{dataset.targets:,} trained ({share:.1f}%)",
        f"at a context of {packed.context:,}: {counts.rows:,} rows, {counts.tokens:,} tokens, "
        f"{counts.targets:,} trained, {100 * counts.padding_share:.1f}% padding",
        f"longer than the context: {counts.truncated:,} truncated, {counts.dropped:,} dropped, "
        f"{counts.split:,} split; {counts.untrained:,} pieces left out with nothing to train",
    ]
    if dataset.bad_count:
        lines.append(f"{dataset.bad_count:,} bad lines skipped, first: {dataset.bad_lines[0]}")
    lines += [f"note: {note}" for note in dataset.notes]
    for line in lines:
        console.print(Text(line))


def examples_json(dataset: TokenDataset, packed: Packed, count: int) -> dict[str, Any]:
    """All of it for programs."""
    counts = packed.counts
    packing = {name: getattr(counts, name) for name in type(counts).__slots__}
    return {
        "documents": len(dataset),
        "tokens": dataset.tokens,
        "trained": dataset.targets,
        "bad_lines": dataset.bad_count,
        "notes": list(dataset.notes),
        "context": packed.context,
        "packing": {**packing, "padding_share": counts.padding_share},
        "examples": [
            {"tokens": len(dataset[number].ids), "parts": parts_of(dataset, number)}
            for number in range(min(count, len(dataset)))
        ],
    }


# --------
# `penstock data show`. Room: show.
#
# Functions ready for typer; `cli.py` gives them their names.

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

    tokenizer = load_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
    dataset = _open(file, tokenizer, cache, skip=skip_bad_lines, quiet=as_json)
    packed = dataset.pack(context, overlong=overlong)
    if as_json:
        print(json.dumps(examples_json(dataset, packed, count)))
        return
    console = Console(highlight=False)
    render_examples(dataset, count, console)
    render_counts(dataset, packed, console)


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
