"""CSV files with a header row."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.data import items
from penstock.data.compression import data_suffix, open_data
from penstock.data.errors import SourceError
from penstock.data.items import FileSource, Item, SourceOffset

DELIMITERS = (",", ";", "\t", "|")
"""Separators of columns in a .csv file. The most frequent one of the header is used."""


class CsvFile(FileSource):
    """A CSV or TSV file. Each row is a record with the names of the header as keys."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with open_data(path) as file:
            first = self._decode(file.readline(items.LONGEST_RECORD), 0)
        self._delimiter = "\t" if data_suffix(path) == ".tsv" else max(DELIMITERS, key=first.count)
        # The default limit of a field is 128 KiB, and it can only be set for the process.
        csv.field_size_limit(items.LONGEST_RECORD)
        with open_data(path) as file:
            rows = self._rows(file, 0, 0)
            self._header, self._start = next(rows, ([], 0))
        if not any(self._header):
            raise SourceError(self.name, "has no header row with the names of its columns")
        twice = [name for name in self._header if self._header.count(name) > 1]
        if twice:
            raise SourceError(self.name, f"has more than one column {twice[0]!r}")

    def read(self, position: SourceOffset) -> Iterator[Item]:
        offset, number = max(position.offset, self._start), position.number
        with open_data(self.path, offset) as file:
            for row, after in self._rows(file, offset, number):
                number += 1
                problem = ""
                if len(row) != len(self._header):
                    problem = f"has {len(row)} values for {len(self._header)} columns"
                record = {} if problem else dict(zip(self._header, row, strict=True))
                where = f"{self.name}, row {number}"
                yield Item(where, record, SourceOffset(after, number), problem)

    def _rows(self, file: BinaryIO, offset: int, number: int) -> Iterator[tuple[list[str], int]]:
        """Yield rows that are not blank, each with the offset after it."""
        at = offset

        def lines() -> Iterator[str]:
            nonlocal at
            for line in file:
                at += len(line)
                yield self._decode(line, at - len(line))

        try:
            # Without `strict`, a missing quote would swallow the rest of the file.
            for row in csv.reader(lines(), delimiter=self._delimiter, strict=True):
                number += bool(row)
                if row:
                    yield row, at
        except csv.Error as wrong:
            problem = f"is not CSV near row {number + 1} (byte {at}): {wrong}; check its quotes"
            raise SourceError(self.name, problem) from None

    def _decode(self, line: bytes, start: int) -> str:
        try:
            return line.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as wrong:
            at = start + wrong.start
            raise SourceError(
                self.name, f"is not UTF-8 text at byte {at}; convert it, for example with iconv"
            ) from None
