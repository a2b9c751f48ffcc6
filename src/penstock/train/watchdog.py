"""Report what a run waits for when it makes no progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds without progress before the first report, at least."""

SLACK = 5.0
"""The first report also waits for this many times the longest pause so far: after a 30 s pause,
report only after 150 s."""


class Watchdog:
    """Runs a thread that reports when `report_progress` has not been called for a while.

    The training thread writes `_last`, `_longest` and `_activity` without a lock, and the watchdog
    thread only reads them. At worst, a report names the previous activity.
    """

    def __init__(
        self,
        describe_wait: Callable[[], str],
        report: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:
        self._describe_wait, self._report, self._patience = describe_wait, report, patience
        self._last = time.monotonic()
        self._longest = 0.0
        self._activity = "the first step"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def report_progress(self, activity: str) -> None:
        """Record that the run makes progress, and what it is doing."""
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last, self._activity = now, activity

    def __enter__(self) -> Watchdog:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def _limit(self) -> float:
        """Seconds without progress before the first report."""
        return max(self._patience, SLACK * self._longest)

    def _watch(self) -> None:
        seen, limit = self._last, self._limit
        while not self._end.wait(min(self._patience / 4, 1.0)):
            last = self._last
            if last != seen:
                seen, limit = last, self._limit
            silent = time.monotonic() - last
            if silent >= limit:
                limit *= 2  # report less and less often
                self._report(self._message(silent))

    def _message(self, silent: float) -> str:
        pending = self._describe_wait()
        reason = f"waiting for {pending}" if pending else "no copy or disk request is pending"
        return f"no progress for {silent:.0f} s in {self._activity}: {reason}"
