"""Stop a run on signals: after the current step at the first, immediately at the second."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

STOPPING = (
    "stopping: finishing the step and saving a checkpoint; send the signal again to stop "
    "immediately"
)
STOPPED = "stopped immediately; continue from the last checkpoint with --resume"


class StopRequest:
    """Handles the signals while it is entered as a context."""

    def __init__(self, exit_process: Callable[[int], None] | None = None) -> None:
        self._exit = exit_process or _exit_process
        self._previous: dict[int, object] = {}
        self.signal: int | None = None
        self.before_exit: Callable[[], None] = lambda: None
        """Called before an immediate exit, to restore the terminal."""

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code by which shells report a signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            self.before_exit()
            _write_error(STOPPED)
            self._exit(128 + number)
            return
        self.signal = number
        _write_error(STOPPING)


def _write_error(text: str) -> None:
    """Write to standard error without Python's buffer, whose lock the interrupted code may hold."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())


def _exit_process(code: int) -> None:
    # Exit without joining threads, which may hang. An unfinished checkpoint is a draft, which the
    # next run removes.
    os._exit(code)
