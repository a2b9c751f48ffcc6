"""Let the n-th file-changing call of this process fail, as a broken or full disk does.

`FailingFiles` replaces the functions of `os` that change files, and `open` for files that are
written. It counts their calls. Calls of native code (the I/O engine of a store, the tokenizers
library) are not seen.
"""

from __future__ import annotations

import builtins
import contextlib
import errno as errors
import io
import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BY_PATH = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "symlink", "truncate", "chmod")
BY_DESCRIPTOR = ("write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "ftruncate")
"""Functions of `os` whose calls are counted. `open` is counted when it may create or write."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class FailingFiles:
    """Counts file-changing calls below some directories, and fails the chosen ones."""

    roots: Collection[Path]
    """Calls on files outside of these directories are not counted."""
    fail: Callable[[int, str, str], int] = lambda number, call, path: 0
    """Called with the number of the call, the function and the path. Returns the errno that the
    call fails with, or 0."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Function and path of every call so far."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Function and path of the calls that failed."""

    def check(self, call: str, path: str) -> None:
        """Count a call, and raise the error if it is to fail."""
        if not any(path.startswith(str(root)) for root in self.roots):
            return
        with self._lock:
            self.calls.append((call, path))
            number = len(self.calls)
            code = self.fail(number, call, path)
            if code:
                self.failed.append((call, path))
        if code:
            by_path = call == "open" or call in BY_PATH
            # As the kernel's errors: calls on descriptors name no file.
            raise OSError(code, os.strerror(code), *([path] if by_path else []))

    @contextlib.contextmanager
    def installed(self) -> Iterator[FailingFiles]:
        """Replace the functions while the block runs."""
        saved = {name: getattr(os, name) for name in (*BY_PATH, *BY_DESCRIPTOR, "open")}
        plain_open = builtins.open
        for name in BY_PATH:
            setattr(os, name, self._by_path(name, saved[name]))
        for name in BY_DESCRIPTOR:
            setattr(os, name, self._by_descriptor(name, saved[name]))
        os.open = self._os_open(saved["open"])
        builtins.open = io.open = self._open(plain_open)  # type: ignore[assignment]
        try:
            yield self
        finally:
            builtins.open = io.open = plain_open
            for name, function in saved.items():
                setattr(os, name, function)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def _by_path(self, name: str, plain: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.check(name, _absolute(path, kwargs.get("dir_fd")))
            return plain(path, *args, **kwargs)

        return call

    def _by_descriptor(self, name: str, plain: Any) -> Any:
        def call(fd: int, *args: Any, **kwargs: Any) -> Any:
            self.check(name, _path_of(fd))
            return plain(fd, *args, **kwargs)

        return call

    def _os_open(self, plain: Any) -> Any:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if flags & _WRITING:
                self.check("open", _absolute(path, kwargs.get("dir_fd")))
            return plain(path, flags, *args, **kwargs)

        return call

    def _open(self, plain: Any) -> Any:
        def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kw: Any) -> Any:
            if not set(mode) & set("wax+"):
                return plain(file, mode, buffering, *args, **kw)
            if not isinstance(file, int):
                self.check("open", _absolute(file))
            raw = _RawFile(self, file, mode.replace("b", "").replace("t", ""),
                           closefd=kw.pop("closefd", True))  # fmt: skip
            if buffering == 0:
                return raw
            wrap = io.BufferedRandom if "+" in mode else io.BufferedWriter
            buffered = wrap(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kw)

        return call


class _RawFile(io.FileIO):
    def __init__(self, files: FailingFiles, file: Any, mode: str, *, closefd: bool) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._files = files

    def write(self, data: Any) -> int:
        self._files.check("write", _path_of(self.fileno()))
        return super().write(data) or 0

    def truncate(self, size: int | None = None) -> int:
        self._files.check("ftruncate", _path_of(self.fileno()))
        return super().truncate(size)


def fail_once(number: int, code: int) -> Callable[[int, str, str], int]:
    """Fail one call, as after a passing disturbance."""
    return lambda at, call, path: code if at == number else 0


def fail_from(number: int, code: int) -> Callable[[int, str, str], int]:
    """Fail every call from a number on, as a disk that breaks, fills up or turns read-only."""
    # A full disk still removes and renames.
    spared = {"unlink", "rmdir", "rename", "fsync", "ftruncate"} if code == errors.ENOSPC else set()
    return lambda at, call, path: code if at >= number and call not in spared else 0


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _absolute(path: Any, directory: int | None = None) -> str:
    if isinstance(path, int):
        return _path_of(path)
    text = os.fsdecode(path)
    return (
        os.path.join(_path_of(directory), text) if directory is not None else os.path.abspath(text)
    )
