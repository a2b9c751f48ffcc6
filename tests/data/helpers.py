"""Create data files and datasets for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.data import TokenDataset, open_dataset
from tests.support.small_tokenizers import small_tokenizer


def chat(*turns: str, system: str = "") -> dict[str, Any]:
    """Return a chat of alternating turns that starts with the user."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return {"messages": [*first, *messages]}


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write records as JSON lines. A string is written unchanged."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def dataset_of(
    tmp_path: Path, records: Iterable[Any], tokenizer: Any = None, **options: Any
) -> TokenDataset:
    """Write records to a file and open it as a dataset."""
    file = write_lines(tmp_path / "data.jsonl", records)
    options = {"cache_dir": tmp_path / "cache", **options}
    return open_dataset(file, tokenizer or small_tokenizer(), **options)


def trained_text(dataset: TokenDataset, number: int = 0) -> list[str]:
    """Return the trained parts of a document as text."""
    from penstock.cli.data import parts_of

    return [part["text"] for part in parts_of(dataset, number) if part["trained"]]


def whole_text(dataset: TokenDataset, number: int = 0) -> str:
    """Return the complete text of a document."""
    return dataset.decode(dataset[number].ids)
