"""Sources of examples: JSON lines, plain text, Parquet files and Hugging Face datasets.

A source yields its items one by one, from the start or from any earlier position, so that
tokenizing can stop and resume. An item that is invalid carries its problem: the reader decides
whether to stop. The libraries for Parquet files and Hugging Face datasets are optional.
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
"""Maximum length of a line of JSON."""

TEXT_PIECE = 1 * MiB
"""Approximate size of the pieces in which plain text is read, so that files of any size fit."""

ROWS_AT_ONCE = 256
"""Number of rows of a Parquet file that are read at a time."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:+-]+)?")


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """A position in a source: everything before it was read."""

    offset: int = 0
    """Number of bytes before it; in a table, of rows."""

    number: int = 0
    """Number of lines before it; in a table, of rows."""


@dataclass(frozen=True, slots=True)
class Item:
    """One example, or a piece of a long plain text."""

    where: str
    """File and line number, for messages."""

    record: Mapping[str, Any]
    """The parsed example; empty if there is a problem."""

    after: SourceOffset
    """Position after this item."""

    problem: str = ""
    """Reason why there is no record; empty if there is one."""

    opens: bool = True
    """Whether a document begins with this item."""

    closes: bool = True
    """Whether a document ends with this item. A piece of a long text may do neither."""


class Source(Protocol):
    """A file, or a dataset on the Hugging Face Hub."""

    name: str
    """Path or dataset id, for messages."""

    size: int
    """Total size, in the units of `SourceOffset.offset`."""

    def identity(self) -> list[str | int]:
        """Return values that change whenever the content of the source changes."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        """Yield the items after this position."""


def find_sources(sources: str | Path | Sequence[str | Path]) -> list[Source]:
    """Find the sources for paths, directories and dataset ids. A directory's files are sorted."""
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    found = [source for name in named for source in _find_source(str(name))]
    if not found:
        raise SourceError("data", "no file was given; pass a file, a directory or a dataset id")
    return found


def _find_source(name: str) -> list[Source]:
    path = Path(name)
    known = LINE_SUFFIXES | TEXT_SUFFIXES | TABLE_SUFFIXES
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.suffix in known and p.is_file())
        if not inside:
            raise SourceError(name, f"contains no data files; Penstock reads {KNOWN}")
        return [_open_file(p) for p in inside]
    if path.is_file():
        return [_open_file(path)]
    if path.exists():
        raise SourceError(
            name, "is not a regular file; data is read more than once, so save it to a file"
        )
    if path.suffix not in known and _HUB_ID.fullmatch(name):
        return [HubDataset(name)]
    raise SourceError(name, "no such file or directory")


def _open_file(path: Path) -> Source:
    if path.suffix in LINE_SUFFIXES:
        return LineFile(path)
    if path.suffix in TEXT_SUFFIXES:
        return TextFile(path)
    if path.suffix in TABLE_SUFFIXES:
        return ParquetFile(path)
    if path.suffix in {".gz", ".zst", ".xz", ".bz2"}:
        raise SourceError(str(path), "is compressed; decompress it first")
    raise SourceError(str(path), f"has an unknown format; Penstock reads {KNOWN}")


class _File:
    """Base class of sources that are local files."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self.size = path.stat().st_size

    def identity(self) -> list[str | int]:
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]


class LineFile(_File):
    """A file with one JSON object per line. Blank lines are skipped."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        offset, number = position.offset, position.number
        with self.path.open("rb") as file:
            file.seek(offset)
            while line := file.readline(LONGEST_LINE):
                length = len(line)
                while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)  # skip the rest of a line that is too long
                    length += len(line)
                offset, number = offset + length, number + 1
                if length <= LONGEST_LINE and not line.strip():
                    continue
                record, problem = (
                    _parse(line) if length <= LONGEST_LINE else ({}, _too_long(length))
                )
                yield Item(f"{self.name}:{number}", record, SourceOffset(offset, number), problem)


def _too_long(length: int) -> str:
    return f"is {format_bytes(length)} long; the limit is {format_bytes(LONGEST_LINE)}"


def _parse(line: bytes) -> tuple[Mapping[str, Any], str]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if b"\\ud" in line.lower():  # a lone surrogate parses, but cannot be encoded
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return {}, "contains half of a surrogate pair (\\ud...), which is not a character"
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
    return {}, f"contains {_json_type(record)}, not an object {{...}}; write one object per line"


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class TextFile(_File):
    """A file that is one document. A form feed (^L, byte 12) starts another one."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        offset, number = position.offset, position.number
        with self.path.open("rb") as file:
            opens = offset == 0 or _byte_before(file, offset) == b"\f"
            for piece, is_last in _pieces(file, offset):
                start, offset, number = offset, offset + len(piece), number + 1
                closes = is_last or piece.endswith(b"\f")
                text = self._decode(piece.removesuffix(b"\f"), start)
                if text.strip() or not (opens and closes):
                    where = f"{self.name}, byte {start}"
                    yield Item(
                        where, {"text": text}, SourceOffset(offset, number), "", opens, closes
                    )
                opens = closes

    def _decode(self, piece: bytes, start: int) -> str:
        try:
            return piece.decode()
        except UnicodeDecodeError as wrong:
            at = start + wrong.start
            raise SourceError(
                self.name, f"is not UTF-8 text at byte {at}; convert it, for example with iconv"
            ) from None


def _byte_before(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset - 1)
    return file.read(1)


def _pieces(file: BinaryIO, offset: int) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of the file from `offset`, and whether each is the last.

    The end of a piece depends only on its start, so that interrupted and resumed reading splits the
    file at the same positions as uninterrupted reading.
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
        end = _piece_end(held, at)
        yield held[at:end], end == len(held)
        at = end


def _piece_end(held: bytes, at: int) -> int:
    """Return the end of the piece that begins at `at`."""
    end = min(at + TEXT_PIECE, len(held))
    feed = held.find(b"\f", at, end)
    if feed >= 0:
        return feed + 1
    if end == len(held):
        return end
    # Split before a blank and not after it: most tokenizers attach it to the next word.
    blank = max(held.rfind(b"\n", at + 1, end), held.rfind(b" ", at + 1, end))
    if blank > 0:
        return blank
    while end > at + 1 and held[end] & 0xC0 == 0x80:  # not inside a UTF-8 character
        end -= 1
    return end


class ParquetFile(_File):
    """A Parquet file. Each row is a record with the column names as keys."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        parquet = _import_library("pyarrow.parquet", "pyarrow", self.name)
        try:
            self._table = parquet.ParquetFile(path)
        except Exception as error:  # pyarrow's exceptions cannot be named without importing it
            raise SourceError(self.name, f"cannot be read as Parquet: {error}") from None
        self.size = int(self._table.metadata.num_rows)

    def read(self, position: SourceOffset) -> Iterator[Item]:
        row = 0
        for batch in self._table.iter_batches(batch_size=ROWS_AT_ONCE):
            if row + batch.num_rows <= position.offset:
                row += batch.num_rows
                continue
            for record in batch.to_pylist():
                row += 1
                if row > position.offset:
                    yield _row_item(self.name, row, record)


class HubDataset:
    """A dataset on the Hub: `owner/name` for its split `train`, or `owner/name:split`."""

    def __init__(self, name: str) -> None:
        self.name = name
        about = "no such file; to read it as a dataset from the Hugging Face Hub"
        datasets = _import_library("datasets", "datasets", name, about)
        owner, _, split = name.partition(":")
        try:
            self._rows = datasets.load_dataset(owner, split=split or "train")
        except Exception as error:  # network, permission, unknown split: quote the library
            raise SourceError(name, f"cannot be loaded from the Hub: {error}") from None
        self.size = len(self._rows)

    def identity(self) -> list[str | int]:
        return [self.name, self.size, str(getattr(self._rows, "_fingerprint", ""))]

    def read(self, position: SourceOffset) -> Iterator[Item]:
        for row in range(position.offset, self.size):
            yield _row_item(self.name, row + 1, self._rows[row])


def _row_item(name: str, row: int, record: dict[str, Any]) -> Item:
    """Return a row as an item. An empty column counts as a missing key."""
    present = {key: value for key, value in record.items() if value is not None}
    return Item(f"{name}, row {row}", present, SourceOffset(row, row))


def _import_library(module: str, package: str, name: str, about: str = "to read it") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SourceError(
            name, f"{about}, install {package}: pip install 'penstock[data]'"
        ) from None
