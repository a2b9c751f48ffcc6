"""EIO, ENOSPC and EROFS at the calls of start-up, steps, saves and the end that change files."""

from __future__ import annotations

import errno
import random
from pathlib import Path

from tests.campaign.file_faults import SCENARIOS, FileFaults
from tests.campaign.results import OK, Outcome, Verdict

CASES = 1000
"""Limit of the number of cases. One call on each kind of file is failed, in every way."""

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EROFS)


class Faults:
    """Fails one call, or all from it on, of a run or a resumed run."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # the bits depend on the number of threads
        self._faults = FileFaults(folder)
        self._cases = [
            (scenario, call, code, once)
            for scenario in SCENARIOS
            for call in self._faults.numbers(scenario, distinct=True)
            for code in ERRNOS
            for once in (True, False)
        ]
        self.cases = len(self._cases)

    def run(self, seed: int, number: int) -> Verdict:
        # In another order for every seed, so that a sample has some of everything.
        order = random.Random(seed).sample(range(len(self._cases)), len(self._cases))
        scenario, call, code, once = self._cases[order[number]]
        ended = self._faults.run_case(call, code, scenario=scenario, once=once)
        if not ended.problem:
            return OK
        return Verdict(_outcome(ended.problem), f"{ended}\n{ended.message[-900:]}")


def _outcome(problem: str) -> Outcome:
    if problem in ("traceback", "hangs"):
        return "traceback" if problem == "traceback" else "hang"
    lost = ("damaged checkpoint", "cannot be resumed")
    return "lost" if problem.startswith(lost) else "silent"
