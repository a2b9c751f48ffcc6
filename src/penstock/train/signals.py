"""Stop a run on signals: after the current step at the first, immediately at the second."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TextIO, cast

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

CLOSED = {errno.EPIPE: signal.SIGPIPE, errno.EIO: signal.SIGHUP}
"""Errors of writing to a pipe without a reader and to a closed terminal, as signals."""

STOPPING = (
    "stopping: finishing the step and saving a checkpoint; send the signal again to stop "
    "immediately"
)
STOPPED = "stopped immediately; continue from the last checkpoint with --resume"


class StopRequest:
    """Handles the signals while it is entered as a context."""

    def __init__(
        self, exit_process: Callable[[int], None] | None = None, *, quiet: bool = False
    ) -> None:
        self._exit = exit_process or _exit_process
        self._quiet = quiet  # where a launcher or another rank tells the user what happens
        self._previous: dict[int, object] = {}
        self.signal: int | None = None
        self.before_exit: Callable[[], None] = lambda: None
        """Called before an immediate exit, to restore the terminal."""

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def entered(self) -> bool:
        """Whether signals are handled here."""
        return bool(self._previous)

    @property
    def exit_code(self) -> int:
        """The exit code by which shells report a signal.

        130 for Ctrl-C, 143 for SIGTERM, 129 for a closed terminal, 141 for a closed pipe.
        """
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            # nohup ignores SIGHUP, so that the run survives the terminal.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
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
        self._previous.clear()

    def request(self, number: int) -> None:
        """Stop after the current step, as at the first signal."""
        if not self.requested:
            self.signal = number
            self._tell(STOPPING)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            # A closed terminal sends SIGHUP several times: from the kernel and from the shell.
            if number == signal.SIGHUP:
                return
            self.before_exit()
            self._tell(STOPPED)
            self._exit(128 + number)
            return
        self.request(number)

    def _tell(self, text: str) -> None:
        if not self._quiet:
            write_error(text)


class SignalInterrupt(KeyboardInterrupt):
    """A signal other than Ctrl-C that ends the process as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP raise SignalInterrupt, also where no StopRequest is entered.

    By default these signals end the process without releasing anything, and a run that has not
    reached its first step would leave its store on the NVMe drive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's default for Ctrl-C raises. Under nohup, SIGHUP stays ignored.
    numbers = [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_DFL]

    def raise_interrupt(number: int, _: FrameType | None) -> None:
        # A second SIGTERM ends the process. A closed terminal sends SIGHUP several times.
        for each in numbers:
            again = signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL
            signal.signal(each, again)
        raise SignalInterrupt(number)

    try:
        for number in numbers:
            signal.signal(number, raise_interrupt)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class GuardedStream:
    """Standard output or error of a run, which may lose its reader.

    After `penstock train | head` or a closed terminal, a write fails. The run then stops as after a
    signal, and what it prints until its end is dropped.
    """

    def __init__(self, stream: TextIO, stop: StopRequest) -> None:
        self._stream, self._stop = stream, stop
        self._closed = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._closed:
            return
        try:
            action()
        except OSError as problem:
            if problem.errno not in CLOSED:
                raise
            self._closed = True
            self._stop.request(CLOSED[problem.errno])


@contextlib.contextmanager
def guard_output(stop: StopRequest) -> Iterator[None]:
    """Request a stop when standard output or standard error loses its reader."""
    output, errors = GuardedStream(sys.stdout, stop), GuardedStream(sys.stderr, stop)
    with (
        contextlib.redirect_stdout(cast(TextIO, output)),
        contextlib.redirect_stderr(cast(TextIO, errors)),
    ):
        yield


def write_error(text: str) -> None:
    """Write to standard error without Python's buffer, whose lock the interrupted code may hold."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())


def _exit_process(code: int) -> None:
    # Exit without joining threads, which may hang. An unfinished checkpoint is a draft, which the
    # next run removes.
    os._exit(code)
