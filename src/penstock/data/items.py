"""Items of a source: examples, and pieces of long texts, with their positions.

A source yields its items one by one, from the start or from any earlier position, so that
tokenizing can stop and resume. An item that is invalid carries its problem: the reader decides
whether to stop.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.data.errors import SourceError
from penstock.units import MiB, format_bytes

LONGEST_RECORD = 256 * MiB
"""Maximum length of an example in a file."""


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

    is_text: bool = False
    """Whether the item is from a file of plain text, which has no columns."""


class Source(Protocol):
    """A file, a saved dataset, or a dataset on the Hugging Face Hub."""

    name: str
    """Path or dataset id, for messages."""

    size: int
    """Total size for progress reports, roughly in the units of `SourceOffset.offset`."""

    def identity(self) -> list[str | int]:
        """Return values that change whenever the content of the source changes."""

    def read(self, position: SourceOffset) -> Iterator[Item]:
        """Yield the items after this position."""


class FileSource:
    """Base class of sources that are local files."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self.size = path.stat().st_size

    def identity(self) -> list[str | int]:
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]


def too_long(length: int) -> str:
    """Describe an example that exceeds `LONGEST_RECORD`."""
    return f"is {format_bytes(length)} long; the limit is {format_bytes(LONGEST_RECORD)}"


def check_record(value: object, raw: str) -> tuple[Mapping[str, Any], str]:
    """Return a parsed JSON value as a record, or the reason why it is none.

    `raw` is the text that it was parsed from.
    """
    try:
        if "\\ud" in raw.lower():  # a lone surrogate parses, but cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return {}, "contains half of a surrogate pair (\\ud...), which is not a character"
    if isinstance(value, dict):
        return value, ""
    return {}, f"contains {_json_type(value)}, not an object {{...}}; write one object per line"


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def import_library(module: str, package: str, name: str, about: str = "to read it") -> Any:
    """Import an optional library, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SourceError(name, f"{about}, install {package}: pip install {package}") from None
