"""Ctrl-C and SIGTERM: once to stop after the step, twice to stop at once. Room: show."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

STOPPING = "stopping: the step is finished, then all is saved; again to stop at once"
AT_ONCE = "stopped at once; go on from the last checkpoint with --resume"


class Stopping:
    """While it is open, signals are heard here."""

    def __init__(self, leave: Callable[[int], None] | None = None) -> None:
        self._leave = leave or _leave
        self._kept: dict[int, object] = {}
        self.signal: int | None = None
        self.before_leaving: Callable[[], None] = lambda: None
        """Puts the terminal right."""

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """As a shell tells a signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Stopping:
        for number in SIGNALS:
            self._kept[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        for number, handler in self._kept.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _heard(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            self.before_leaving()
            _say(AT_ONCE)
            self._leave(128 + number)
            return
        self.signal = number
        _say(STOPPING)


def _say(text: str) -> None:
    """Past all buffers and locks: whatever was interrupted may hold them."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())


def _leave(code: int) -> None:
    """Without a word to threads that may hang. What a save had begun is a draft, swept later."""
    os._exit(code)
