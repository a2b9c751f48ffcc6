"""Examples and counts for people and for programs. Room: show."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
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


def as_json(dataset: TokenDataset, packed: Packed, count: int) -> dict[str, Any]:
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
