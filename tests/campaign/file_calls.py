"""Act at one of the calls of `os` and `open` that change files."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from typing import Any

CALLS = ("open", "write", "pwrite", "ftruncate", "fsync", "fdatasync", "rename", "replace", "link",
         "symlink", "unlink", "remove", "mkdir", "rmdir", "chmod")  # fmt: skip
"""Functions of `os` that change a file system or make a change durable."""

Act = Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]
"""Called with the number, from 0, the name, the function and its arguments, before each call."""

After = Callable[[int], None]


def watch_calls(before: Act, after: After) -> None:
    """Replace the functions in this process, which must be a fork. Reads are not counted."""
    numbers = iter(range(1 << 62))

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name.endswith("open") and not _writes(name, args, more):
                return real(*args, **more)
            number = next(numbers)
            before(number, name, real, args)
            result = real(*args, **more)
            after(number)
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    opened = wrap("io.open", io.open)
    io.open = builtins.open = opened


def _writes(name: str, args: tuple[Any, ...], more: dict[str, Any]) -> bool:
    """Return whether a call opens a file for writing."""
    if name == "open":
        flags = args[1] if len(args) > 1 else more.get("flags", 0)
        return bool(flags & (os.O_WRONLY | os.O_RDWR))
    mode = args[1] if len(args) > 1 else more.get("mode", "r")
    return isinstance(mode, str) and any(letter in mode for letter in "wax+")
