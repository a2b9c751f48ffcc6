"""Records as files: strict when read, whole or not at all when written. Room: names."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from penstock.errors import RecordError
from penstock.records import from_json, to_json

T = TypeVar("T")

_WIDTH = 100


def load(cls: type[T], path: str | Path, error: type[RecordError] = RecordError) -> T:
    """Read a record. OSError if the file cannot be read, `error` if what it says is wrong."""
    raw = Path(path).read_bytes()
    try:
        return from_json(cls, parse(raw), where=str(path), error=error)
    except RecordError as problem:
        raise error(problem.field, problem.problem, where=str(path)) from None


def save(value: object, path: str | Path) -> None:
    """Write a record so that a reader finds the old file or the new one, never a part."""
    text = layout(to_json(value)) + "\n"
    target = Path(os.path.realpath(path))  # a link stays a link; what it points to is replaced
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    # Without this a power cut may keep the file and lose its name.
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def parse(text: str | bytes) -> object:
    """JSON as the standard has it: no NaN or Infinity, and no key twice in one object."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(
            decoded, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except RecordError:
        raise
    except json.JSONDecodeError as wrong:
        raise RecordError(
            f"line {wrong.lineno}, column {wrong.colno}", f"is not JSON: {wrong.msg}"
        ) from None
    except RecursionError:
        raise RecordError("", "is nested too deeply to be a record") from None
    except ValueError as wrong:  # bytes that are not UTF-8, or a number of thousands of digits
        raise RecordError("", f"is not JSON: {wrong}") from None


def layout(data: Any, indent: str = "") -> str:
    """JSON for people: what fits on a line stays on it, and so does a list of plain values."""
    flat = json.dumps(data, allow_nan=False)
    plain = isinstance(data, list) and not any(isinstance(item, list | dict) for item in data)
    if not isinstance(data, list | dict) or plain or len(indent) + len(flat) <= _WIDTH:
        return flat
    deeper = indent + "  "
    if isinstance(data, dict):
        rows = [f"{json.dumps(key)}: {layout(item, deeper)}" for key, item in data.items()]
    else:
        rows = [layout(item, deeper) for item in data]
    first, last = "{}" if isinstance(data, dict) else "[]"
    body = ",\n".join(deeper + row for row in rows)
    return f"{first}\n{body}\n{indent}{last}"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RecordError(next(key for key in whole if keys.count(key) > 1), "is given twice")
    return whole


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse(literal)


def _refuse(literal: str) -> NoReturn:
    raise RecordError("", f"{literal} is not a number that JSON has; leave the field out")
