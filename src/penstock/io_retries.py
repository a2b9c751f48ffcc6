"""Repeat file operations that failed for a moment, and count how often that was necessary.

A drive that resets its controller, or a network file system that changes its server, fails requests
for some tens of milliseconds up to about a second. A run that takes days should not end for that.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from time import sleep
from typing import TypeVar

T = TypeVar("T")

TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})
"""Errors that may be gone when an operation is repeated. A full or read-only disk stays full or
read-only, and is reported immediately."""

PAUSES = (0.05, 0.15, 0.3, 0.5, 1.0)
"""Seconds before each repetition: five of them, over two seconds."""

_lock = threading.Lock()
_counts: dict[str, int] = {}


def is_transient(error: BaseException) -> bool:
    """Return whether an operation that raised this error is worth repeating."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


def repeat(operation: Callable[[], T], path: str, pauses: Sequence[float] = PAUSES) -> T:
    """Call `operation` until it does not fail with a transient error; raise the last one.

    Every call must do all of the work. In particular, do not repeat `fsync` alone: after a failed
    fsync, Linux marks the pages clean, or drops them, and reports the error only once. A second
    fsync succeeds although the data never reached the disk. Write the file again from the start.
    """
    for pause in pauses:
        try:
            return operation()
        except OSError as error:
            if not is_transient(error):
                raise
        count(path)
        sleep(pause)
    return operation()


def count(path: str) -> None:
    """Count one repetition on a path."""
    with _lock:
        _counts[path] = _counts.get(path, 0) + 1


def take_counts() -> dict[str, int]:
    """Return the repetitions on each path since the last call."""
    with _lock:
        counts = dict(_counts)
        _counts.clear()
    return counts
