"""`penstock data show`: show which tokens of the data are trained."""

from __future__ import annotations

import inspect
import json
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from penstock.cli.flags import (
    keyword,
    set_parameters,
    settings_from_flags,
    settings_parameters,
)
from penstock.cli.output import AsJson, printable
from penstock.data.batches import Packed
from penstock.data.dataset import TokenDataset
from penstock.settings import Settings

MOST_TOKENS = 1000
"""Maximum number of tokens shown per example."""

TRAINED, MASKED = "bold green", "dim"
OPENS, CLOSES = "[+", "+]"
"""Marks around trained text on terminals without colors."""

SETTINGS = (
    *(
        "columns",
        "streaming",
        "context",
        "overlong",
        "skip_bad_lines",
        "cache",
        "revision",
        "trust_remote_code",
    ),
)

data_app = typer.Typer(help="Inspect training data.", no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Inspect training data."""


def show_command(**flags: Any) -> None:
    """Print examples with trained and masked tokens, and count what packing does to the data."""
    from penstock.data import load_tokenizer
    from penstock.train.sizes import choose_context

    files, model, count, as_json = (flags.pop(name) for name in ("file", "model", "count", "json"))
    settings = settings_from_flags(flags)
    tokenizer = load_tokenizer(
        model,
        revision=settings.model.revision,
        trust_remote_code=settings.model.trust_remote_code,
    )
    dataset = _open_dataset(files, tokenizer, settings, quiet=as_json)
    limit = getattr(tokenizer, "model_max_length", None)
    context = settings.data.context or choose_context(
        dataset, max_context=limit, batch=None, one_per_row=False
    )
    packed = dataset.pack(context, overlong=settings.data.overlong)
    if as_json:
        print(json.dumps(examples_json(dataset, packed, count)))
        return
    console = Console(highlight=False)
    render_examples(dataset, count, console)
    render_counts(dataset, packed, console)


def parts_of(dataset: TokenDataset, number: int) -> list[dict[str, Any]]:
    """Split one document into runs of trained and masked text."""
    document = dataset[number]
    pairs = zip(document.ids.tolist(), document.trained.tolist(), strict=True)
    runs = groupby(list(pairs)[:MOST_TOKENS], key=lambda pair: pair[1])
    return [
        {"trained": is_trained, "tokens": len(ids), "text": dataset.decode(ids)}
        for is_trained, pairs in runs
        for ids in [[token for token, _ in pairs]]
    ]


def render_examples(dataset: TokenDataset, count: int, console: Console) -> None:
    """Print the first documents, with trained text in color or between marks."""
    has_color = console.color_system is not None
    opens, closes = ("", "") if has_color else (OPENS, CLOSES)
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
                line.append(f"{opens}{printable(part['text'])}{closes}", TRAINED)
            else:
                line.append(printable(part["text"]), MASKED)
        if total > MOST_TOKENS:
            line.append(f" ... {total - MOST_TOKENS:,} more tokens")
        console.print(line)


def render_counts(dataset: TokenDataset, packed: Packed, console: Console) -> None:
    """Print how many documents and tokens there are, before and after packing."""
    counts = packed.counts
    console.rule(style="dim")
    share = 100 * dataset.targets / max(1, dataset.tokens)
    lines = [
        f"{len(dataset):,} documents, {dataset.tokens:,} tokens, "
        f"{dataset.targets:,} trained ({share:.1f}%)",
        f"with a context of {packed.context:,}: {counts.rows:,} rows, {counts.tokens:,} tokens, "
        f"{counts.targets:,} trained, {100 * counts.padding_share:.1f}% padding",
        f"longer than the context: {counts.truncated:,} truncated, {counts.dropped:,} dropped, "
        f"{counts.split:,} split; {counts.cut:,} trained tokens cut; {counts.untrained:,} pieces "
        f"without trained tokens left out",
    ]
    if dataset.bad_count:
        noun = "line" if dataset.bad_count == 1 else "lines"
        lines.append(f"{dataset.bad_count:,} bad {noun} skipped, first: {dataset.bad_lines[0]}")
    lines += [f"note: {note}" for note in dataset.notes]
    for line in lines:
        console.print(Text(printable(line)))


def examples_json(dataset: TokenDataset, packed: Packed, count: int) -> dict[str, Any]:
    """Convert examples and counts for --json."""
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


def _open_dataset(
    files: list[str], tokenizer: object, settings: Settings, *, quiet: bool
) -> TokenDataset:
    """Tokenize the data, with a progress bar on standard error if it is a terminal."""
    from penstock.data import open_dataset

    console = Console(stderr=True, highlight=False)
    hidden = quiet or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("reading", total=None)

        def report(done: int, total: int, text: str) -> None:
            if total:
                bar.update(task, completed=done, total=total, description=text)
            elif not quiet:
                console.print(printable(text), markup=False)

        return open_dataset(
            files,
            tokenizer,
            columns=settings.data.column_names,
            streaming=settings.data.streaming,
            cache_dir=settings.data.cache,
            skip_bad_lines=settings.data.skip_bad_lines,
            on_progress=report,
        )


def _parameters() -> list[inspect.Parameter]:
    required = inspect.Parameter.empty
    file = typer.Argument(
        help="Files (.jsonl, .json, .csv, .txt, .parquet, ...), directories or Hub dataset IDs."
    )
    model = typer.Option(help="Model whose tokenizer to use: a directory or a Hub model ID.")
    count = typer.Option(help="Number of examples to print.", min=0)
    return [
        keyword("file", Annotated[list[str], file], required),
        keyword("model", Annotated[str, model], required),
        keyword("count", Annotated[int, count], 3),
        *settings_parameters(SETTINGS),
        keyword("json", AsJson, False),
    ]


set_parameters(show_command, _parameters())
data_app.command("show")(show_command)
