"""Parquet and Arrow files, and datasets that `datasets` saved with `save_to_disk`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.data.errors import SourceError
from penstock.data.items import FileSource, Item, SourceOffset, import_library
from penstock.errors import RecordError
from penstock.records import read_json

ROWS_AT_ONCE = 256
"""Number of rows of a table that are read at a time."""

SPLITS = "dataset_dict.json"
"""File that lists the splits of a saved `DatasetDict`."""


class ParquetFile(FileSource):
    """A Parquet file. Each row is a record with the column names as keys."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        parquet = import_library("pyarrow.parquet", "pyarrow", self.name)
        try:
            self._table = parquet.ParquetFile(path)
        except Exception as error:  # pyarrow's exceptions cannot be named without importing it
            raise SourceError(self.name, f"cannot be read as Parquet: {error}") from None
        self.size = int(self._table.metadata.num_rows)

    def read(self, position: SourceOffset) -> Iterator[Item]:
        batches = self._table.iter_batches(batch_size=ROWS_AT_ONCE)
        return _row_items(self.name, batches, position)


class ArrowFiles:
    """Arrow files that make up one dataset."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name, self._files = name, list(files)
        self._arrow = import_library("pyarrow", "pyarrow", name)
        self._ipc = import_library("pyarrow.ipc", "pyarrow", name)
        self.size = sum(batch.num_rows for batch in self._batches())

    def identity(self) -> list[str | int]:
        return [
            part
            for file in self._files
            for part in (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        ]

    def read(self, position: SourceOffset) -> Iterator[Item]:
        return _row_items(self.name, self._batches(), position)

    def _batches(self) -> Iterator[Any]:
        for file in self._files:
            try:
                mapped = self._arrow.memory_map(str(file))
                try:
                    yield from self._ipc.open_stream(mapped)
                except self._arrow.ArrowInvalid:  # not a stream, but a file that can be sought in
                    reader = self._ipc.open_file(mapped)
                    yield from (reader.get_batch(n) for n in range(reader.num_record_batches))
            except (OSError, self._arrow.ArrowInvalid) as error:
                raise SourceError(str(file), f"cannot be read as Arrow: {error}") from None


def is_saved_dataset(path: Path) -> bool:
    """Return whether a directory was written by `save_to_disk`."""
    parts = ("state.json", "dataset_info.json")
    return (path / SPLITS).is_file() or all((path / part).is_file() for part in parts)


def open_saved_dataset(path: Path, split: str = "") -> ArrowFiles:
    """Open a directory that `save_to_disk` wrote; of a `DatasetDict`, one split."""
    if (path / SPLITS).is_file():
        splits = [str(name) for name in _read_json(path / SPLITS).get("splits", [])]
        chosen = split or "train"
        if chosen not in splits:
            raise SourceError(
                str(path),
                f"has no split {chosen!r}; write {path}:SPLIT with one of {', '.join(splits)}",
            )
        path = path / chosen
    elif split:
        raise SourceError(str(path), f"is one dataset without splits, so it has no {split!r}")
    state = _read_json(path / "state.json")
    if state.get("_indices_data_files"):
        raise SourceError(
            str(path), "has a separate index; save it again with a newer version of `datasets`"
        )
    files = [path / str(entry["filename"]) for entry in state.get("_data_files", [])]
    return ArrowFiles(str(path), files)


def row_item(name: str, row: int, record: dict[str, Any]) -> Item:
    """Return a row as an item. An empty column counts as a missing key."""
    present = {key: value for key, value in record.items() if value is not None}
    return Item(f"{name}, row {row}", present, SourceOffset(row, row))


def _row_items(name: str, batches: Iterator[Any], position: SourceOffset) -> Iterator[Item]:
    row = 0
    for batch in batches:
        if row + batch.num_rows <= position.offset:
            row += batch.num_rows
            continue
        for at in range(0, batch.num_rows, ROWS_AT_ONCE):
            for record in batch.slice(at, ROWS_AT_ONCE).to_pylist():
                row += 1
                if row > position.offset:
                    yield row_item(name, row, record)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except RecordError as error:
        raise SourceError(str(path), f"cannot be read: {error.problem}") from None
    return content if isinstance(content, dict) else {}
