"""Says what is waited for when nothing moves. Room: show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds without a sign of progress until the first word."""

SLACK = 5.0
"""A run whose longest pause was 30 s is not stuck after 60: so many times that is waited."""


class Watchdog:
    """A thread beside the training. `moved` is called with every sign of progress."""

    def __init__(
        self, waiting: Callable[[], str], tell: Callable[[str], None], patience: float = PATIENCE
    ) -> None:
        self._waiting, self._tell, self._patience = waiting, tell, patience
        self._last = time.monotonic()
        self._longest = 0.0
        self._what = "the first step"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def moved(self, what: str) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last, self._what = now, what

    def __enter__(self) -> Watchdog:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def _limit(self) -> float:
        """Seconds of silence until the first word."""
        return max(self._patience, SLACK * self._longest)

    def _watch(self) -> None:
        told_at, wait = self._last, self._limit
        while not self._end.wait(min(self._patience / 4, 1.0)):
            last = self._last
            if last != told_at:
                told_at, wait = last, self._limit
            silent = time.monotonic() - last
            if silent >= wait:
                wait *= 2
                self._tell(self._words(silent))

    def _words(self, silent: float) -> str:
        pending = self._waiting()
        reason = f"waiting for {pending}" if pending else "no copy or disk request is waited for"
        return f"nothing has moved for {silent:.0f} s in {self._what}: {reason}"
