"""Parquet files and hub datasets, where their libraries are installed. Room: show."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.data.errors import SourceError
from penstock.data.sources import Item, Place

ROWS_AT_ONCE = 256


class ParquetFile:
    """The rows of a parquet file, each a record by its column names."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        parquet = _library("pyarrow.parquet", "pyarrow", self.name)
        try:
            self._table = parquet.ParquetFile(path)
        except Exception as wrong:  # pyarrow's own kinds cannot be named without it
            raise SourceError(self.name, f"cannot be read as parquet: {wrong}") from None
        self.size = int(self._table.metadata.num_rows)

    def identity(self) -> list[str | int]:
        told = self.path.stat()
        return [str(self.path.resolve()), told.st_size, told.st_mtime_ns]

    def read(self, place: Place) -> Iterator[Item]:
        row = 0
        for batch in self._table.iter_batches(batch_size=ROWS_AT_ONCE):
            if row + batch.num_rows <= place.offset:
                row += batch.num_rows
                continue
            for record in batch.to_pylist():
                row += 1
                if row > place.offset:
                    yield _item(self.name, row, record)


class HubDataset:
    """A dataset of the hub: `owner/name`, or `owner/name:split` where the split is not `train`."""

    def __init__(self, name: str) -> None:
        self.name = name
        about = "there is no such file, and to read it as a dataset of the Hugging Face hub"
        datasets = _library("datasets", "datasets", name, about)
        owner, _, split = name.partition(":")
        try:
            self._rows = datasets.load_dataset(owner, split=split or "train")
        except Exception as wrong:  # network, permission, unknown split: the library's own words
            raise SourceError(name, f"cannot be loaded from the hub: {wrong}") from None
        self.size = len(self._rows)

    def identity(self) -> list[str | int]:
        return [self.name, self.size, str(getattr(self._rows, "_fingerprint", ""))]

    def read(self, place: Place) -> Iterator[Item]:
        for row in range(place.offset, self.size):
            yield _item(self.name, row + 1, self._rows[row])


def _item(name: str, row: int, record: dict[str, Any]) -> Item:
    """A column that a row leaves empty is a key that it does not have."""
    kept = {key: value for key, value in record.items() if value is not None}
    return Item(f"{name}, row {row}", kept, Place(row, row))


def _library(module: str, package: str, name: str, about: str = "to read it") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SourceError(name, f"{about}, install {package}: pip install {package}") from None
