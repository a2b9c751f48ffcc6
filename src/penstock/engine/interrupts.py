"""Delay signals, such as Ctrl-C, while the computing thread must complete what it does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals whose handlers, of Python or of the user, may raise an exception."""

Handler = Callable[[int, FrameType | None], Any]


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
    previous: dict[int, Handler] = {}

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
        raised = _restore(previous, note)
        for each, frame in dict(arrived).items():
            try:
                previous[each](each, frame)
            except BaseException as error:  # the other signals have handlers as well
                raised.append(error)
        if raised:
            raise raised[0]


def _restore(previous: Mapping[int, Handler], note: Handler) -> list[BaseException]:
    """Give all signals their handlers back, and return what these have raised meanwhile.

    A handler may be called, and raise, as soon as it is back.
    """
    raised: list[BaseException] = []
    while left := [number for number in previous if signal.getsignal(number) is note]:
        try:
            for number in left:
                signal.signal(number, previous[number])
        except BaseException as error:
            raised.append(error)
    return raised
