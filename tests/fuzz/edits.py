"""Edits of files: drawn at random, stored as JSON, and applied to a copy of a right file.

An edit says where it changes the file and not what the file looks like afterwards, so a kept input
stays small and also applies to the files of a later version.
"""

from __future__ import annotations

import json
import random
import string
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, 0.5, -1.5, 1e-300, 1e300, 1e9, float("nan"), float("inf"), -float("inf")),
    *(True, False, None, "", "1", "x", "auto", "\x00", "nan", "9" * 5000, "é" * 50, "../..", "*"),
    *("\ud800", "\x1b[31m", "/dev/null", "/", "1e999", "-0", "[", "{}"),
    *([], [0], [1, "x", None], {}, {"a": 1}, [[[[]]]], {"": {"": {}}}),
)
"""Values that are rarely right."""


@dataclass(frozen=True)
class Edit:
    """A change of one file."""

    file: str
    """Path of the file below the inputs, e.g. `model/config.json`."""
    op: str
    """`set`, `remove` and `rename` change a value at `path`; `splice` replaces `length` bytes at
    `at` by `text`; `whole` replaces the content by `text`, repeated `length` times."""
    path: tuple[str | int, ...] = ()
    value: Any = None
    at: int = 0
    length: int = 0
    text: str = ""

    def apply(self, raw: bytes) -> bytes:
        """Return the changed content of a file."""
        if self.op == "whole":
            return _encode(self.text) * self.length
        if self.op == "splice":
            at = min(self.at, len(raw))
            return raw[:at] + _encode(self.text) + raw[at + self.length :]
        read, write = _format(self.file)
        return write(_change(read(raw), self), raw)


def _change(data: Any, edit: Edit) -> Any:
    *path, last = edit.path
    holder = data
    for key in path:
        holder = holder[key]
    if edit.op == "remove":
        del holder[last]
    elif edit.op == "rename":
        holder[edit.text] = holder.pop(last)
    else:
        holder[last] = edit.value
    return data


def _encode(text: str) -> bytes:
    # Bytes that are not UTF-8 are stored as surrogates; JSON escapes keep other surrogates.
    return text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "surrogatepass")


def _is_escaped(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text)


# Formats. Each pair reads a file into nested lists and dictionaries, and writes them.


def _read_lines(raw: bytes) -> Any:
    return [json.loads(line) for line in raw.splitlines() if line.strip()]


def _write_lines(data: Any, _: bytes) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in data)


def _read_header(raw: bytes) -> Any:
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size])


def _write_header(data: Any, raw: bytes) -> bytes:
    """Write a safetensors file with another header and the same data."""
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.dumps(data).encode()
    return struct.pack("<Q", len(header)) + header + raw[8 + size :]


def _dump_yaml(data: Any, _: bytes) -> bytes:
    text = yaml.safe_dump(data, allow_unicode=False)
    return text.encode("utf-8", "surrogatepass")


def _format(file: str) -> tuple[Callable[[bytes], Any], Callable[[Any, bytes], bytes]]:
    match Path(file).suffix:
        case ".jsonl":
            return _read_lines, _write_lines
        case ".safetensors":
            return _read_header, _write_header
        case ".yaml":
            return yaml.safe_load, _dump_yaml
        case ".json":
            return json.loads, lambda data, _: json.dumps(data).encode()
    raise ValueError(f"{file} has no values; only its bytes can be changed")


def has_values(file: str) -> bool:
    """Return whether the values of a file can be changed, and not only its bytes."""
    return Path(file).suffix in (".json", ".jsonl", ".yaml", ".safetensors")


# Drawing.


def draw_edit(file: str, raw: bytes, rng: random.Random) -> Edit:
    """Draw a change of a file: mostly of one value, sometimes of the bytes."""
    if not has_values(file) or rng.random() < 0.2:
        return _draw_damage(file, raw, rng)
    data = _format(file)[0](raw)
    paths = list(_paths(data))
    if not paths:
        return _draw_damage(file, raw, rng)
    path = rng.choice(paths)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    chance = rng.random()
    if chance < 0.1:
        return Edit(file, "remove", path)
    if chance < 0.2 and isinstance(holder, dict):
        return Edit(file, "rename", path, text=f"{path[-1]}x")
    return Edit(file, "set", path, _odd(rng, holder[path[-1]]))


def _draw_damage(file: str, raw: bytes, rng: random.Random) -> Edit:
    """Cut a file off, repeat, remove or replace a part of it, or replace it."""
    at, length = rng.randrange(len(raw) + 1), rng.randrange(1, 20)
    piece = raw[at : at + length].decode("utf-8", "surrogateescape")
    noise = "".join(rng.choices(string.printable, k=length))
    binary = bytes(rng.choices(range(256), k=length)).decode("utf-8", "surrogateescape")
    one = raw.find(b"1")
    return rng.choice(
        (
            Edit(file, "splice", at=at, length=len(raw)),
            Edit(file, "splice", at=at, length=length),
            Edit(file, "splice", at=at, text=piece),
            Edit(file, "splice", at=at, length=length, text=noise),
            Edit(file, "splice", at=at, length=length, text=binary),
            Edit(file, "splice", at=at, length=length, text="\x00" * length),
            Edit(file, "splice", at=max(one, 0), length=1, text="9" * 5000),
            Edit(file, "whole", text="[", length=10 ** rng.randrange(2, 6)),
            Edit(file, "whole", text='{"a":', length=10 ** rng.randrange(2, 5)),
            Edit(file, "whole", text="\x00", length=rng.choice((1, 4096))),
            Edit(file, "whole", text=json.dumps(rng.choice(ODD)), length=1),
        )
    )


def _odd(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int | float) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value)))
    if isinstance(value, list) and value and rng.random() < 0.4:
        return rng.choice((value[:-1], [*value, value[-1]], value[::-1]))
    if isinstance(value, str) and value and rng.random() < 0.3:
        return rng.choice((value[:-1], value * 2, value.upper(), [value], f" {value}"))
    return rng.choice(ODD)


def _paths(data: Any) -> Iterator[tuple[Any, ...]]:
    if not isinstance(data, dict | list):
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (key,)
        for path in _paths(value):
            yield (key, *path)
