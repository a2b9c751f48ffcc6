"""`penstock train --profile N`: the first steps of a run, recorded. Room: show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.observe.observer import Observer, finish
from penstock.train.events import Event

PROFILE = "profile"
"""The directory within the run's own."""


class ProfiledSteps:
    """Listens, and ends the recording after so many steps."""

    def __init__(self, out: str | Path, steps: int, note: Callable[[str], None]) -> None:
        self._path, self._left, self._note = Path(out) / PROFILE, steps, note
        self._observer = Observer(self._path)
        self._observer.start()

    def hear(self, event: Event) -> None:
        if event["event"] not in ("step", "skipped") or not self._left:
            return
        self._left -= 1
        if not self._left:
            self._end("exit")

    def close(self) -> None:
        """The run has ended before."""
        if self._left:
            self._left = 0
            self._end("the end of the run")

    def _end(self, ended_by: str) -> None:
        self._observer.stop(ended_by)
        self._note(finish(self._path))
