"""Delay signals, such as Ctrl-C, while the computing thread must complete what it does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers, of Python or of the user, may raise an exception."""


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Call the handlers of signals that arrive inside the `with` block at its end.

    Python calls handlers between two operations of the main thread, and nowhere else. In other
    threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    previous: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append((number, frame))

    try:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                previous[number] = handler
                signal.signal(number, note)
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
        for each, frame in dict(arrived).items():
            previous[each](each, frame)
