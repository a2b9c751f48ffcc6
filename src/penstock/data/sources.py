"""Where examples come from: files of lines, plain text, tables. Room: show.

A source reads its items one by one from any place it has been at, so that tokenizing can stop and
go on. It says what is wrong with an item instead of raising: who reads decides whether to stop.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from penstock.data.errors import SourceError
from penstock.units import MiB, format_bytes

LINE_SUFFIXES = {".jsonl", ".ndjson", ".json"}
TEXT_SUFFIXES = {".txt", ".text", ".md"}
TABLE_SUFFIXES = {".parquet"}
KNOWN = "JSON lines (.jsonl, .ndjson, .json), text (.txt, .text, .md) and .parquet"

LONGEST_LINE = 256 * MiB
TEXT_PIECE = 1 * MiB
"""Plain text is read in pieces of about this size, so that no file has to fit into memory."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:+-]+)?")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a source was read."""

    offset: int = 0
    """Bytes; in a table, rows."""

    number: int = 0
    """Lines; in a table, rows."""


@dataclass(frozen=True, slots=True)
class Item:
    """One example, or a part of a long plain text."""

    where: str
    record: Mapping[str, Any]
    after: Place
    problem: str = ""
    """Why there is no record, where there is none."""

    opens: bool = True
    closes: bool = True
    """It begins and ends a document. A piece of a long text may do neither."""


class Source(Protocol):
    """A file, or a dataset of the Hugging Face hub."""

    name: str
    size: int
    """In the units of `Place.offset`."""

    def identity(self) -> list[str | int]:
        """What tells it from an older state of itself."""

    def read(self, place: Place) -> Iterator[Item]:
        """Its items from there on."""


def find_sources(sources: str | Path | Sequence[str | Path]) -> list[Source]:
    """Each path, directory or hub id as sources. A directory gives its files by name."""
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    found = [source for name in named for source in _find(str(name))]
    if not found:
        raise SourceError("data", "no file was given")
    return found


def _find(name: str) -> list[Source]:

    path = Path(name)
    known = LINE_SUFFIXES | TEXT_SUFFIXES | TABLE_SUFFIXES
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.suffix in known and p.is_file())
        if not inside:
            raise SourceError(name, f"has no data files; Penstock reads {KNOWN}")
        return [_open_file(p) for p in inside]
    if path.is_file():
        return [_open_file(path)]
    if path.exists():
        raise SourceError(name, "is no regular file; data is read more than once, so save it first")
    if path.suffix not in known and _HUB_ID.fullmatch(name):
        return [HubDataset(name)]
    raise SourceError(name, "there is no such file or directory")


def _open_file(path: Path) -> Source:

    if path.suffix in LINE_SUFFIXES:
        return LineFile(path)
    if path.suffix in TEXT_SUFFIXES:
        return TextFile(path)
    if path.suffix in TABLE_SUFFIXES:
        return ParquetFile(path)
    if path.suffix in {".gz", ".zst", ".xz", ".bz2"}:
        raise SourceError(str(path), "is compressed; unpack it first")
    raise SourceError(str(path), f"is of an unknown kind; Penstock reads {KNOWN}")


class _File:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self.size = path.stat().st_size

    def identity(self) -> list[str | int]:
        told = self.path.stat()
        return [str(self.path.resolve()), told.st_size, told.st_mtime_ns]


class LineFile(_File):
    """One JSON object a line. Blank lines are passed over."""

    def read(self, place: Place) -> Iterator[Item]:
        offset, number = place.offset, place.number
        with self.path.open("rb") as file:
            file.seek(offset)
            while line := file.readline(LONGEST_LINE):
                length = len(line)
                while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)  # the rest of a line that is too long
                    length += len(line)
                offset, number = offset + length, number + 1
                if length <= LONGEST_LINE and not line.strip():
                    continue
                record, problem = (
                    _parse(line) if length <= LONGEST_LINE else ({}, _too_long(length))
                )
                yield Item(f"{self.name}:{number}", record, Place(offset, number), problem)


def _too_long(length: int) -> str:
    return f"is {format_bytes(length)} long; the most is {format_bytes(LONGEST_LINE)}"


def _parse(line: bytes) -> tuple[Mapping[str, Any], str]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return {}, "holds half of a surrogate pair (\\ud...), which is no character"
    except UnicodeDecodeError as wrong:
        return {}, f"is not UTF-8 at byte {wrong.start} of the line"
    except json.JSONDecodeError as wrong:
        hint = " (a JSON array over several lines? Write one object per line)"
        is_array = line.lstrip().startswith(b"[") or line.strip() in (b"{", b"]", b"}", b"},")
        return {}, f"is not JSON: {wrong.msg} at column {wrong.colno}{hint if is_array else ''}"
    except (RecursionError, ValueError) as wrong:
        return {}, f"is not JSON: {wrong}"
    if isinstance(record, dict):
        return record, ""
    return {}, f"holds {_kind(record)}, not an object {{...}}; write one object per line"


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


class TextFile(_File):
    """A document per file; a form feed (^L, byte 12) begins another one."""

    def read(self, place: Place) -> Iterator[Item]:
        offset, number = place.offset, place.number
        with self.path.open("rb") as file:
            opens = offset == 0 or _byte_before(file, offset) == b"\f"
            for piece, is_last in _pieces(file, offset):
                start, offset, number = offset, offset + len(piece), number + 1
                closes = is_last or piece.endswith(b"\f")
                text = self._decode(piece.removesuffix(b"\f"), start)
                if text.strip() or not (opens and closes):
                    where = f"{self.name}, byte {start}"
                    yield Item(where, {"text": text}, Place(offset, number), "", opens, closes)
                opens = closes

    def _decode(self, piece: bytes, start: int) -> str:
        try:
            return piece.decode()
        except UnicodeDecodeError as wrong:
            at = start + wrong.start
            raise SourceError(
                self.name, f"is not UTF-8 text at byte {at}; convert it, with iconv for instance"
            ) from None


def _byte_before(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset - 1)
    return file.read(1)


def _pieces(file: BinaryIO, offset: int) -> Iterator[tuple[bytes, bool]]:
    """The file from there on, and whether a piece is its last.

    Where a piece ends hangs on where it begins and on nothing else, so that reading which stopped
    and went on cuts as reading in one go does.
    """
    file.seek(offset)
    held, at, is_over = b"", 0, False
    while True:
        if len(held) - at < TEXT_PIECE + 1 and not is_over:
            more = file.read(4 * TEXT_PIECE)
            held, at, is_over = held[at:] + more, 0, not more
            continue
        if at == len(held):
            return
        end = _cut(held, at)
        yield held[at:end], end == len(held)
        at = end


def _cut(held: bytes, at: int) -> int:
    """The end of the piece that begins at `at`."""
    end = min(at + TEXT_PIECE, len(held))
    feed = held.find(b"\f", at, end)
    if feed >= 0:
        return feed + 1
    if end == len(held):
        return end
    # Before a blank rather than after it: most tokenizers put it with the word that follows.
    blank = max(held.rfind(b"\n", at + 1, end), held.rfind(b" ", at + 1, end))
    if blank > 0:
        return blank
    while end > at + 1 and held[end] & 0xC0 == 0x80:  # not inside a character
        end -= 1
    return end


# --------
# Parquet files and hub datasets, where their libraries are installed. Room: show.

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
