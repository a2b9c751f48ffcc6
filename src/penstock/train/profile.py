"""`penstock train --profile N`: record the first steps of a run, on all its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.observe.observer import Observer, finish
from penstock.observe.recorder import now
from penstock.observe.records import TRAIN_PROFILE
from penstock.train.events import Event
from penstock.train.rank_commands import RankLeader


class StepProfiler:
    """Records a run until it has taken a number of steps or ends."""

    def __init__(
        self, out: str | Path, steps: int, note: Callable[[str], None], leader: RankLeader
    ) -> None:
        self._path, self._left, self._note = Path(out) / TRAIN_PROFILE, steps, note
        self._leader = leader
        self._observer = Observer(self._path)
        self._observer.start()  # deletes earlier recordings, also those of other ranks
        leader.profile(str(self._path.absolute()), self._observer.origin, steps)

    def handle(self, event: Event) -> None:
        if event["event"] not in ("step", "skipped") or not self._left:
            return
        self._left -= 1
        if not self._left:
            self._leader.wait_for_ranks()  # until their files are complete
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


class RankProfiler:
    """Records another rank than the first. Rank 0 records the machine, and says when to begin."""

    def __init__(self, path: Path, steps: int, origin: float | None) -> None:
        self._left = steps
        self._observer = Observer(path).within(now() if origin is None else origin)
        # What cannot be written is missing in the report, and must not end the run.
        with contextlib.suppress(OSError, PenstockError):
            self._observer.start()

    def count_step(self) -> None:
        """Note a step, and stop after the last one."""
        self._left -= 1
        if not self._left:
            self._stop("exit")

    def close(self) -> None:
        """Stop the recording if the run has ended before the last recorded step."""
        if self._left > 0:
            self._stop("the end of the run")

    def _stop(self, ended_by: str) -> None:
        with contextlib.suppress(OSError, PenstockError):
            self._observer.stop(ended_by)
