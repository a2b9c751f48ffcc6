"""JSON files: one object per line, or an array of objects."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from penstock.data import items
from penstock.data.compression import open_data
from penstock.data.errors import SourceError
from penstock.data.items import FileSource, Item, Source, SourceOffset, check_record
from penstock.units import MiB

READ_BYTES = 1 * MiB
"""Number of bytes of an array that are read at a time."""


def open_json(path: Path) -> Source:
    """Open a JSON file. Its first character decides: `[` begins an array of examples."""
    with open_data(path) as file:
        start = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip()
        while not start and (more := file.read(1)):
            start = more.lstrip()
    return ArrayFile(path) if start.startswith(b"[") else LineFile(path)


class LineFile(FileSource):
    """A file with one JSON object per line. Blank lines are skipped."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        offset, number = position.offset, position.number
        with open_data(self.path, offset) as file:
            while line := file.readline(items.LONGEST_RECORD):
                length = len(line)
                while len(line) == items.LONGEST_RECORD and not line.endswith(b"\n"):
                    line = file.readline(
                        items.LONGEST_RECORD
                    )  # skip the rest of a line that is too long
                    length += len(line)
                offset, number = offset + length, number + 1
                if length <= items.LONGEST_RECORD and not line.strip():
                    continue
                record, problem = (
                    _parse(line) if length <= items.LONGEST_RECORD else ({}, items.too_long(length))
                )
                yield Item(f"{self.name}:{number}", record, SourceOffset(offset, number), problem)


def _parse(line: bytes) -> tuple[Mapping[str, Any], str]:
    try:
        text = line.decode("utf-8-sig")
        return check_record(json.loads(text), text)
    except UnicodeDecodeError as wrong:
        return {}, f"is not UTF-8 at byte {wrong.start} of the line"
    except json.JSONDecodeError as wrong:
        hint = " (an object over several lines? Write one object per line, or an array of objects)"
        is_spread = line.strip() in (b"[", b"{", b"]", b"}", b"},")
        return {}, f"is not JSON: {wrong.msg} at column {wrong.colno}{hint if is_spread else ''}"
    except (RecursionError, ValueError) as wrong:
        return {}, f"is not JSON: {wrong}"


class ArrayFile(FileSource):
    """A file with one JSON array, whose elements are the examples."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        with open_data(self.path, position.offset) as file:
            reader = _ArrayReader(file, self.name, position.offset)
            number = position.number
            while (element := reader.next_element(number + 1)) is not None:
                number += 1
                value, raw = element
                record, problem = check_record(value, raw)
                after = SourceOffset(reader.offset, number)
                yield Item(f"{self.name}, element {number}", record, after, problem)


class _ArrayReader:
    """Parses the elements of an array one by one, so that a file of any size can be read."""

    def __init__(self, file: BinaryIO, name: str, offset: int) -> None:
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._is_over = "", 0, False
        self._is_first = offset == 0
        self.offset = offset
        """Number of bytes before the next element."""

    def next_element(self, number: int) -> tuple[object, str] | None:
        """Return the next element and its text; None at the end of the array."""
        if self._is_first:
            if self._peek() == "\ufeff":
                self._advance(1)
            self._expect("[", number)
        if self._peek() == "]":
            self._advance(1)
            if self._peek():
                raise SourceError(self._name, "has more text after the end of its JSON array")
            return None
        if not self._is_first:
            self._expect(",", number)
        self._is_first = False
        self._peek()
        return self._parse(number)

    def _parse(self, number: int) -> tuple[object, str]:
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as wrong:
                # It may only be cut off. Read as much again, so that the work stays linear.
                length = len(self._text) - self._at
                if self._is_over or length > items.LONGEST_RECORD:
                    problem = wrong.msg if self._is_over else items.too_long(length)
                    raise self._error(number, f"is not JSON: {problem}") from None
                self._fill(length)
                continue
            except (RecursionError, ValueError) as wrong:
                raise self._error(number, f"is not JSON: {wrong}") from None
            raw = self._text[self._at : end]
            self._advance(end - self._at)
            return value, raw

    def _peek(self) -> str:
        """Skip blanks, and return the next character; "" at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._advance(1)
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_over:
                return ""
            self._fill()

    def _expect(self, sign: str, number: int) -> None:
        if self._peek() != sign:
            found = self._peek() or "the end of the file"
            raise self._error(number, f"is preceded by {found!r} instead of {sign!r}")
        self._advance(1)

    def _advance(self, count: int) -> None:
        self.offset += len(self._text[self._at : self._at + count].encode())
        self._at += count

    def _fill(self, least: int = 0) -> None:
        data = self._file.read(max(READ_BYTES, least))
        self._is_over = not data
        try:
            text = self._decoder.decode(data, final=self._is_over)
        except UnicodeDecodeError:
            problem = f"is not UTF-8 near byte {self.offset}"
            raise SourceError(self._name, problem) from None
        self._text, self._at = self._text[self._at :] + text, 0

    def _error(self, number: int, problem: str) -> SourceError:
        return SourceError(
            self._name, f"element {number} of its JSON array {problem} (byte {self.offset})"
        )
