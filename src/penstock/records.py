"""Convert frozen dataclasses to JSON files and back, following their type hints.

A record is a dataclass whose fields are int, float, str, bool, Literal, StrEnum, other records,
`tuple[T, ...]`, `Mapping[int | str, T]`, one of these `| None`, or `Json`. Reading is strict: every
error names the field that is wrong, including errors that a record's own `__post_init__` raises.
Writing is atomic: a reader finds the old file or the new one, never a part.

Two class attributes extend what a file may contain:

- `FORMAT`, an int that goes with a field `version`: a file with a higher version is rejected for
  that reason, and not for the fields that this version does not know.
- `from_number`, a classmethod: the record may be written as a plain number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import functools
import json
import math
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from penstock.durable_files import SHARED, replace_file
from penstock.errors import RecordError
from penstock.units import parse_bytes

T = TypeVar("T")

_LARGEST = sys.float_info.max
_LINE_WIDTH = 100


class _Size:
    """Marks an int that a file may also contain as a string with a unit."""


class _Unchecked:
    """Marks a field that is read without any check."""


Json = Annotated[Any, _Unchecked]
"""Any JSON value, kept unchanged. The code that uses the field checks it."""

Bytes = Annotated[int, _Size]
"""A number of bytes. A file may also say `"64GiB"`; it is written as a plain number."""


def to_json(value: object) -> object:
    """Convert a record to values for `json.dumps`, without fields that are empty by default."""
    return _write(value, "")


def from_json(
    cls: type[T], data: object, where: str = "", error: type[RecordError] = RecordError
) -> T:
    """Build a `cls` from parsed JSON. Raises `error`, which names `where` and the field."""
    try:
        if not isinstance(data, Mapping):
            raise RecordError("", f"must contain an object {{...}}, got {_show(data)}")
        return _read_record(cls, data, "")
    except RecordError as problem:
        raise error(problem.field, problem.problem, where=where) from None


def load(cls: type[T], path: str | Path, error: type[RecordError] = RecordError) -> T:
    """Read a record from a file. Raises `error` if the file cannot be read or is invalid."""
    return from_json(cls, read_json(path, error), where=str(path), error=error)


def read_json(path: str | Path, error: type[RecordError] = RecordError) -> object:
    """Read a JSON file. Raises `error` if the file cannot be read or is not valid JSON."""
    with _os_errors_as(error, path, "read"):
        raw = Path(path).read_bytes()
    try:
        return parse(raw)
    except RecordError as problem:
        raise error(problem.field, problem.problem, where=str(path)) from None


def save(
    value: object,
    path: str | Path,
    error: type[RecordError] = RecordError,
    *,
    mode: int = SHARED,
) -> None:
    """Write a record atomically: a reader finds the old file or the new one, never a part.

    `mode` is that of the new file, before the umask. A terminal, a pipe or a device such as
    /dev/null is written to and not replaced. Raises `error` if the path cannot be written.
    """
    text = layout(to_json(value)) + "\n"
    with _os_errors_as(error, path, "written"):
        if (descriptor := _descriptor(path)) is not None:
            # Write through the descriptor: opening the path again would overwrite a redirected
            # file from its start.
            with open(descriptor, "w", encoding="utf-8", closefd=False) as stream:
                stream.write(text)
        elif _is_special(path):
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            # Replace the target of a symbolic link, not the link itself.
            replace_file(os.path.realpath(path), text, mode=mode)


def parse(text: str | bytes) -> object:
    """Parse strict JSON: no NaN or Infinity, and no key twice in one object."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(
            decoded,
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_finite,
        )
    except RecordError:
        raise
    except json.JSONDecodeError as error:
        raise RecordError(
            f"line {error.lineno}, column {error.colno}", f"is not JSON: {error.msg}"
        ) from None
    except RecursionError:
        raise RecordError("", "is nested too deeply") from None
    except ValueError as error:  # bytes that are not UTF-8, or a number with thousands of digits
        raise RecordError("", f"is not JSON: {error}") from None


def parse_lines(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines that are JSON objects, as text and parsed.

    Other lines are skipped: the last one may be cut off, because the program was killed.
    """
    for line in text.splitlines():
        with contextlib.suppress(RecordError):
            if isinstance(data := parse(line), dict):
                yield line, data


def finite_number(data: object) -> float | None:
    """Return a finite number as a float; None for any other value."""
    return _number(float, data)


@contextmanager
def named_by(where: str | Path, kind: type[RecordError] = RecordError) -> Iterator[None]:
    """Add the name of a file to errors of a kind, about its fields, that do not name one."""
    try:
        yield
    except kind as problem:
        if problem.where:
            raise
        raise type(problem)(problem.field, problem.problem, where=str(where)) from None


def layout(data: Any, indent: str = "") -> str:
    """Format JSON for people: values that fit on one line, and lists of scalars, are not split."""
    flat = json.dumps(data, allow_nan=False)
    plain = isinstance(data, list) and not any(isinstance(item, list | dict) for item in data)
    if not isinstance(data, list | dict) or plain or len(indent) + len(flat) <= _LINE_WIDTH:
        return flat
    deeper = indent + "  "
    if isinstance(data, dict):
        rows = [f"{json.dumps(key)}: {layout(item, deeper)}" for key, item in data.items()]
    else:
        rows = [layout(item, deeper) for item in data]
    first, last = "{}" if isinstance(data, dict) else "[]"
    body = ",\n".join(deeper + row for row in rows)
    return f"{first}\n{body}\n{indent}{last}"


# Converting to JSON.


def _write(value: object, path: str) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        omitted = {f.name for f in dataclasses.fields(value) if _is_empty_default(value, f)}
        return {k: _write(v, _join(path, k)) for k, v in values.items() if k not in omitted}
    if isinstance(value, Mapping):
        return {str(k): _write(v, f"{path}[{k}]") for k, v in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(path, f"must be finite to be written, got {value}")
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Sequence):
        return [_write(item, f"{path}[{i}]") for i, item in enumerate(value)]
    raise TypeError(f"{path or 'value'}: a record cannot contain a {type(value).__name__}")


def _is_empty_default(record: object, field: dataclasses.Field[Any]) -> bool:
    """Return whether the field is empty and reading a file without it restores that value."""
    value = getattr(record, field.name)
    empty = value is None or (isinstance(value, str | Sequence | Mapping) and len(value) == 0)
    return empty and bool(value == _default(field))


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# Converting from JSON.


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _read_record(cls: type[T], data: object, path: str) -> T:
    if not isinstance(data, Mapping):
        raise RecordError(path, f"must be {_describe_type(cls)}, got {_show(data)}")
    _reject_newer_version(cls, data, path)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise RecordError(_join(path, str(key)), _unknown_field_problem(str(key), data, fields))
    hints = _hints(cls)  # type: ignore[arg-type]
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _read(hints[name], data[name], _join(path, name))
        elif _required(field):
            expected = _describe_type(hints[name])
            raise RecordError(_join(path, name), f"is missing; it must be {expected}")
    with _prefix_errors_with(path):
        return cls(**values)


@contextmanager
def _prefix_errors_with(path: str) -> Iterator[None]:
    """Prefix errors that a record raises about itself with the record's path in the file."""
    try:
        yield
    except RecordError as problem:
        raise RecordError(_join(path, problem.field), problem.problem) from None


def _reject_newer_version(cls: type, data: Mapping[Any, object], path: str) -> None:
    newest, version = getattr(cls, "FORMAT", None), data.get("version")
    if newest is not None and isinstance(version, int | float) and version > newest:
        raise RecordError(
            _join(path, "version"),
            f"is {_show(version)}, but this Penstock reads versions up to {newest}; "
            f"upgrade Penstock, or create the file again with this version",
        )


def _unknown_field_problem(
    key: str, data: Mapping[Any, object], fields: Mapping[str, object]
) -> str:
    close = difflib.get_close_matches(key, [name for name in fields if name not in data], n=1)
    hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(fields)}"
    return f"is not a field here; {hint}"


def _read(hint: Any, data: object, path: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if _Unchecked in args[1:]:
            return data
        return _read_size(data, path) if _Size in args[1:] else _read(args[0], data, path)
    if origin in (Union, UnionType):
        (inner,) = (arg for arg in args if arg is not NoneType)
        return None if data is None else _read(inner, data, path)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise RecordError(path, f"must be {_describe_type(hint)}, got {_show(data)}")
        return tuple(_read(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return _read_mapping(hint, data, path)
    if dataclasses.is_dataclass(hint):
        short = getattr(hint, "from_number", None)
        if short is not None and _is_number(data):
            number = _read_scalar(float, data, path)
            with _prefix_errors_with(path):
                return short(number)
        return _read_record(hint, data, path)  # type: ignore[arg-type]
    return _read_scalar(hint, data, path)


def _read_mapping(hint: Any, data: object, path: str) -> dict[Any, Any]:
    key_hint, value_hint = get_args(hint)
    if not isinstance(data, Mapping):
        raise RecordError(path, f"must be {_describe_type(hint)}, got {_show(data)}")
    for key in data:
        # JSON keys are strings. "01" is rejected so that two keys never mean the same number.
        if key_hint is int and not re.fullmatch(r"0|-?[1-9][0-9]{0,17}", str(key)):
            raise RecordError(path, f"must have whole numbers for keys, got {_show(key)}")
    return {key_hint(key): _read(value_hint, item, f"{path}[{key}]") for key, item in data.items()}


def _read_size(data: object, path: str) -> int:
    try:
        value = _number(int, parse_bytes(data) if isinstance(data, str) else data)
    except (ValueError, OverflowError):
        value = None
    if value is None:
        raise RecordError(path, f"must be {_describe_type(Bytes)}, got {_show(data)}")
    return int(value)


def _read_scalar(hint: Any, data: object, path: str) -> Any:
    if hint in (int, float):
        value = _number(hint, data)
        if value is not None:
            return value
    elif hint in (str, bool):
        if type(data) is hint:
            _check_text(data, path)
            return data
    else:
        choices = _choices(hint)
        for choice in choices:
            # Compare the types as well, because True == 1.
            if type(data) is type(getattr(choice, "value", choice)) and data == choice:
                return choice
    raise RecordError(path, f"must be {_describe_type(hint)}, got {_show(data)}")


def _check_text(data: object, path: str) -> None:
    """Raise RecordError for text that could not be written to a file later.

    JSON can escape half of a character, and a path may have bytes that are not UTF-8.
    """
    if isinstance(data, str) and not data.isascii():
        try:
            data.encode()
        except UnicodeEncodeError:
            raise RecordError(path, f"must be UTF-8 text, got {_show(data)}") from None


def _number(hint: type, data: object) -> int | float | None:
    """Return `data` as a number of type `hint`, or None. An int may be written as 1e9."""
    if not isinstance(data, int | float) or isinstance(data, bool):
        return None
    if not abs(data) <= _LARGEST:  # infinite, NaN, or too large to be read back
        return None
    if hint is float:
        return float(data)
    return int(data) if int(data) == data and abs(data) < 1 << 63 else None


def _is_number(data: object) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


# Error messages.


def _choices(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return tuple(hint)
    raise TypeError(f"{hint} is not a valid field type for a record")


def _describe_type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if _Unchecked in args:
            return "present"
        if _Size in args:
            return 'a number of bytes such as 4096 or "64GiB"'
        return _describe_type(args[0])
    if origin in (Union, UnionType):
        return _describe_type(next(arg for arg in args if arg is not NoneType))
    if origin is tuple:
        return "a list"
    if dataclasses.is_dataclass(hint):
        return "an object {...}" + (" or a number" if hasattr(hint, "from_number") else "")
    if origin is not None and origin is not Literal:
        return "an object {...}"
    plain = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return plain.get(hint) or " or ".join(_show(choice) for choice in _choices(hint))


def _show(data: object) -> str:
    try:
        text = json.dumps(data)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(data).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


# Files.


def _is_special(path: str | Path) -> bool:
    """Return whether the path exists and is not a regular file. Raises OSError for a disk."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a disk, and writing would overwrite its first bytes")
    return not stat.S_ISREG(mode)


def _descriptor(path: str | Path) -> int | None:
    """Return N if the path is our open descriptor N: /dev/stdout, /dev/fd/N, or a link to one."""
    at = str(path)
    for _ in range(40):  # the kernel follows at most 40 links
        parent, name = os.path.realpath(os.path.dirname(at)), os.path.basename(at)
        if parent == f"/proc/{os.getpid()}/fd" and name.isdigit():
            return int(name)
        if not os.path.islink(at):
            return None
        at = os.path.join(parent, os.readlink(at))
    return None


@contextlib.contextmanager
def _os_errors_as(error: type[RecordError], path: str | Path, action: str) -> Iterator[None]:
    """Raise OSErrors as `error`. `action` is "read" or "written"."""
    try:
        yield
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise error("", f"cannot be {action}: {reason}", where=str(path)) from cause


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    whole = dict(pairs)
    if len(whole) < len(pairs):
        # Count in one pass: a hostile file may contain millions of keys.
        counts = Counter(key for key, _ in pairs)
        raise RecordError(next(key for key in whole if counts[key] > 1), "is given twice")
    return whole


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _reject_constant(literal)


def _reject_constant(literal: str) -> NoReturn:
    raise RecordError("", f"{literal} is not a valid JSON number; leave the field out")
