"""`penstock train --profile N`: record the first steps of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.observe.observer import Observer, finish
from penstock.observe.records import TRAIN_PROFILE
from penstock.train.events import Event


class StepProfiler:
    """Records a run until it has taken a number of steps or ends."""

    def __init__(self, out: str | Path, steps: int, note: Callable[[str], None]) -> None:
        self._path, self._left, self._note = Path(out) / TRAIN_PROFILE, steps, note
        self._observer = Observer(self._path)
        self._observer.start()

    def handle(self, event: Event) -> None:
        if event["event"] not in ("step", "skipped") or not self._left:
            return
        self._left -= 1
        if not self._left:
            self._stop("exit")

    def close(self) -> None:
        """Stop the recording if the run has ended before the last recorded step."""
        if self._left:
            self._left = 0
            self._stop("the end of the run")

    def _stop(self, ended_by: str) -> None:
        # A profile that was removed, or a disk that is full, must not end the run.
        try:
            self._observer.stop(ended_by)
            self._note(finish(self._path))
        except (OSError, PenstockError) as problem:
            self._note(f"warning: no profile: {problem}. Training continues")
