"""Runs that share a directory for their stores: they start, clear leftovers and are killed."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.campaign.forks import Ended, Fork, Limits, penstock
from tests.campaign.results import OK, Verdict
from tests.campaign.tiny_runs import LIMITS, TinyRuns

CASES = 100

RUNS = 3
"""Number of runs of a case."""


class ConcurrentRuns:
    """Starts several runs on one scratch directory; some are killed, and the others must finish."""

    def __init__(self, folder: Path) -> None:
        self.runs = TinyRuns(folder)
        start = time.monotonic()
        here = self._new_case()
        ended = self.runs.start(self.runs.flags(here / "out", disk=here / "disk"), here).end()
        assert ended.code == 0, ended.errors
        self.seconds = time.monotonic() - start

    def _new_case(self) -> Path:
        shutil.rmtree(self.runs.case, ignore_errors=True)
        self.runs.case.mkdir()
        (self.runs.case / "disk").mkdir()
        return self.runs.case

    def run(self, seed: int, number: int) -> Verdict:
        rng = random.Random(f"{seed} {number}")
        here = self._new_case()
        disk = here / "disk"
        started: list[tuple[Path, Fork, float | None]] = []
        begin = time.monotonic()
        for index in range(RUNS):
            place = here / str(index)
            place.mkdir()
            command = self.runs.flags(place / "out", disk=disk)
            # Every run clears leftovers at its start. One call does it while others start and end.
            if index == RUNS - 1 and rng.random() < 0.5:
                command = ["store", "rm", str(disk)]
            kill = rng.uniform(0, self.seconds * RUNS) if rng.random() < 0.4 else None
            limits = Limits(LIMITS.cpu_seconds, None, LIMITS.wall_seconds)
            started.append((place, Fork(penstock(command), place, limits), kill))
            time.sleep(rng.choice((0, 0, rng.uniform(0, self.seconds / 2))))
        for _, fork, kill in sorted(started, key=lambda one: one[2] or float("inf")):
            if kill is not None:
                fork.wait(max(0.0, begin + kill - time.monotonic()))
                fork.kill()
        for place, fork, kill in started:
            verdict = self._judge(place, fork.end(), killed=kill is not None)
            if verdict.outcome != "ok":
                return Verdict(verdict.outcome, f"{place.name}: {verdict.detail}")
        return self._check_leftovers(here, disk)

    def _judge(self, place: Path, ended: Ended, *, killed: bool) -> Verdict:
        """Judge a run: it was killed, or it ended with the result of a run without others."""
        if killed and ended.code < 0 and not ended.hung:
            return OK
        if (place / "out").exists():
            return self.runs.check(ended, place / "out")
        return OK if ended.code == 0 else Verdict("lost", f"{ended.code}: {ended.errors[-900:]}")

    def _check_leftovers(self, here: Path, disk: Path) -> Verdict:
        """What killed runs have left must be removable, and nothing else must be left."""
        ended = Fork(penstock(["store", "rm", str(disk)]), here, LIMITS).end()
        if ended.code != 0:
            return Verdict("lost", f"store rm: {ended.code}: {ended.errors[-900:]}")
        left = sorted(path.name for path in disk.rglob("*") if path.is_file())
        return Verdict("lost", f"files are left: {left[:5]}") if left else OK
