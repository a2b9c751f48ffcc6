"""Records as files: strict when read, whole or not at all when written. Room: names."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from penstock.errors import RecordError
from penstock.records import from_json, to_json

T = TypeVar("T")

_WIDTH = 100


def load(cls: type[T], path: str | Path, error: type[RecordError] = RecordError) -> T:
    """Read a record. `error` if the file cannot be read or what it says is wrong."""
    with _told(path, "read", error):
        raw = Path(path).read_bytes()
    try:
        return from_json(cls, parse(raw), where=str(path), error=error)
    except RecordError as problem:
        raise error(problem.field, problem.problem, where=str(path)) from None


def save(value: object, path: str | Path, error: type[RecordError] = RecordError) -> None:
    """Write a record so that a reader finds the old file or the new one, never a part.

    What is no file (a terminal, a pipe, /dev/null) is written to and stays what it is. `error` if
    it cannot be written.
    """
    text = layout(to_json(value)) + "\n"
    with _told(path, "written", error):
        if (descriptor := _descriptor(path)) is not None:
            # Opened by its name, a file behind it would be written from its start once more.
            with open(descriptor, "w", encoding="utf-8", closefd=False) as stream:
                stream.write(text)
        elif _is_special(path):
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            _replace(Path(os.path.realpath(path)), text)  # what a link points to, not the link


def _is_special(path: str | Path) -> bool:
    """There is something at the path and it is not a file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a disk, which would lose its first bytes")
    return not stat.S_ISREG(mode)


def _replace(target: Path, text: str) -> None:
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


def _descriptor(path: str | Path) -> int | None:
    """N where the path means our open descriptor N: /dev/stdout, /dev/fd/N, a link to them."""
    at = str(path)
    for _ in range(40):  # as many links as the kernel follows
        parent, name = os.path.realpath(os.path.dirname(at)), os.path.basename(at)
        if parent == f"/proc/{os.getpid()}/fd" and name.isdigit():
            return int(name)
        if not os.path.islink(at):
            return None
        at = os.path.join(parent, os.readlink(at))
    return None


@contextlib.contextmanager
def _told(path: str | Path, done: str, error: type[RecordError]) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        reason = failed.strerror or str(failed)
        raise error("", f"cannot be {done}: {reason}", where=str(path)) from failed


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
        # Counted in one pass: a file made to be slow to refuse would have millions of keys.
        counts = Counter(key for key, _ in pairs)
        raise RecordError(next(key for key in whole if counts[key] > 1), "is given twice")
    return whole


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse(literal)


def _refuse(literal: str) -> NoReturn:
    raise RecordError("", f"{literal} is not a number that JSON has; leave the field out")
