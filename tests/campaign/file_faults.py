"""Fail every file-changing call of a small training, and judge how it ends.

    python -m tests.campaign.file_faults                  # all cases; prints one line for each
    python -m tests.campaign.file_faults --every 17       # a sample

A case is a scenario, the number of a call, an errno, and whether the disk recovers (`once`) or
stays broken. After the failure, the disk works again and the run is resumed. An outcome is bad
unless the command succeeds or ends with one line that names a path and exit code 1, and the
resumed run has the same bits as an undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.checkpoint.run_directory import list_checkpoints
from penstock.storage.leftovers import remove_empty_directories
from tests.campaign import results
from tests.campaign.results import Verdict
from tests.support.failing_files import FailingFiles, fail_from, fail_once
from tests.train.runs import RunResult, Runs, contents, run_command

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES)
CASES = 600
"""Number of cases of a campaign; all of them are about eight times as many."""

STEPS = 3
SCENARIOS = ("train", "resume")
_VARIABLE = re.compile(r"[0-9a-f]{8,}|-[0-9]+|[a-z_.]+\.(json|jinja)")
"""Parts of names that differ between files of one kind."""

SECONDS = 120
"""A case that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended."""

    scenario: str
    call: int
    function: str
    path: str
    errno: int
    once: bool
    code: int
    message: str
    """The errors that were printed."""
    problem: str
    """What is wrong with the outcome; "" if it is as documented."""

    def __str__(self) -> str:
        how = "once" if self.once else "from then on"
        verdict = f"BAD: {self.problem}" if self.problem else "ok"
        return (
            f"{self.scenario} call {self.call} {self.function} {self.path} "
            f"{errno.errorcode[self.errno]} {how}: exit {self.code}, {verdict}"
        )


class FileFaults:
    """The model, the data and the undisturbed runs that cases are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = Runs(folder / "inputs")
        self._expected: dict[str, bytes] = {}
        self._calls: dict[str, list[tuple[str, str]]] = {}
        # Before the first case: the self-check computes for seconds, and its result is cached.
        with self._case("train", warm=False) as at:
            self._check(self._start("train", at))
            shutil.copytree(at / "home", folder / "home")
            self._expected = contents(at / "out")
        with self._case("train") as at:
            # A run that could save only its first step.
            files = FailingFiles([at / "out/.checkpoint-000002", at / "out/.checkpoint-000003"],
                                 lambda number, call, path: errno.EROFS)  # fmt: skip
            with files.installed():
                assert self._start("train", at).code == 1
            assert [one.step for one in list_checkpoints(at / "out").whole] == [1]
            shutil.copytree(at / "out", folder / "started")

    def calls(self, scenario: str) -> list[tuple[str, str]]:
        """Return function and path of every file-changing call of an undisturbed run."""
        if scenario not in self._calls:
            with self._case(scenario) as at:
                files = FailingFiles([at])
                with files.installed():
                    self._check(self._start(scenario, at))
            self._calls[scenario] = [(call, _below(at, path)) for call, path in files.calls]
        return self._calls[scenario]

    def numbers(self, scenario: str, *, distinct: bool = False) -> list[int]:
        """Return the numbers of all calls, or of the first call on each kind of file."""
        first: dict[object, int] = {}
        for number, (function, path) in enumerate(self.calls(scenario), start=1):
            first.setdefault((function, _VARIABLE.sub("*", path)) if distinct else number, number)
        return list(first.values())

    def cases(self, scenarios: Sequence[str], *, distinct: bool = False) -> list[dict[str, Any]]:
        """Return the arguments of `run_case` for every call, errno and duration."""
        return [
            {"scenario": scenario, "call": call, "code": code, "once": once}
            for scenario in scenarios
            for call in self.numbers(scenario, distinct=distinct)
            for code in ERRNOS
            for once in (True, False)
        ]

    def run_case(
        self, call: int, code: int, *, scenario: str = "train", once: bool = True
    ) -> Outcome:
        """Fail one call, or all calls from it on, and judge the outcome."""
        fail = fail_once(call, code) if once else fail_from(call, code)
        with self._case(scenario) as at:
            files = FailingFiles([at], fail)
            try:
                # Pauses between repetitions do not change an outcome.
                no_pause = mock.patch("penstock.io_retries.sleep")
                with files.installed(), no_pause, _time_limit():
                    result = self._start(scenario, at)
                problem = self._judge(result, at) or self._judge_resume(at, may_leave=not once)
            except TimeoutError as hung:
                result, problem = RunResult(-1, "", str(hung)), "hang"
            function, path = files.failed[0] if files.failed else ("", "")
            return Outcome(
                scenario, call, function, _below(at, path), code, once, result.code,
                result.errors, problem,
            )  # fmt: skip

    @contextlib.contextmanager
    def _case(self, scenario: str, *, warm: bool = True) -> Iterator[Path]:
        """Yield a new directory with everything that a run writes to: out, disk, cache, home."""
        at = Path(tempfile.mkdtemp(dir=self.folder, prefix="case-"))
        (at / "disk").mkdir()
        if warm:
            shutil.copytree(self.folder / "home", at / "home")
        else:
            (at / "home").mkdir()
        if scenario == "resume":
            shutil.copytree(self.folder / "started", at / "out")
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(at / "home")
        try:
            yield at
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
            shutil.rmtree(at, ignore_errors=True)

    def runs_in(self, at: Path, *more: str) -> RunResult:
        budget = ("--hbm", "900KiB", "--dram", "500KiB", "--nvme", f"{at / 'disk'}:64MiB")
        flags = self.runs.flags(at / "out", *budget, "--keep", "2", *more)
        flags[flags.index("--cache") + 1] = str(at / "cache")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run_command(flags)

    def _start(self, scenario: str, at: Path) -> RunResult:
        more = ["--steps", str(STEPS), "--save-every", "1"]
        return self.runs_in(at, *more, *(["--resume"] if scenario == "resume" else []))

    def _judge(self, result: RunResult, at: Path) -> str:
        if "Traceback" in result.errors or result.code == 70:
            return "traceback"
        if result.code == 0:
            lost = contents(at / "out") != self._expected
            return "exit code 0, and the last checkpoint differs" if lost else ""
        last = result.errors.strip().splitlines()[-1:]
        if result.code != 1:
            return f"exit code {result.code}"
        if not last or not last[0].startswith("error: "):
            return "no error message"
        return "" if str(at) in last[0] else "the message names no path"

    def _judge_resume(self, at: Path, *, may_leave: bool) -> str:
        """Resume with a disk that works, and compare the bits.

        A broken disk keeps files of a store. The next run removes them because their process has
        ended; here, both runs are in one process. An empty directory, which a single failure may
        leave, is removed by runs that start a while later.
        """
        whole = list_checkpoints(at / "out")
        if whole.damaged:
            return f"damaged checkpoint: {whole.damaged[0]}"
        resumed = self._start("resume", at)
        if resumed.code != 0:
            return f"cannot be resumed: {resumed.errors.strip()[-300:]}"
        if contents(at / "out") != self._expected:
            return "the resumed run has other bits"
        left = [path.name for path in at.rglob(".*") if ".tmp" in path.name]
        for entry in (at / "disk").iterdir():
            os.utime(entry, (0, 0))
        remove_empty_directories([at / "disk"])
        left += [] if may_leave else os.listdir(at / "disk")
        return f"leaves {', '.join(left)}" if left else ""

    def _check(self, result: RunResult) -> None:
        assert result.code == 0, result.errors


class FailingCalls:
    """The cases as a kind of the campaign: the errnos over all calls, in a drawn order."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # the bits depend on the number of threads
        self._faults = FileFaults(folder)
        self._cases = self._faults.cases(SCENARIOS)
        self.cases = len(self._cases)

    def run(self, seed: int, number: int) -> Verdict:
        order = random.Random(seed).sample(range(self.cases), self.cases)
        outcome = self._faults.run_case(**self._cases[order[number]])
        kind: results.Outcome = "ok"
        if outcome.problem:
            kind = outcome.problem if outcome.problem in ("traceback", "hang") else "lost"
        return Verdict(kind, f"{outcome}\n{outcome.message}" if outcome.problem else "")


def run_case(call: int, code: int, *, scenario: str = "train", once: bool = True) -> Outcome:
    """Run one case, with inputs that all cases of this process share."""
    return _shared().run_case(call, code, scenario=scenario, once=once)


_instances: list[FileFaults] = []


def _shared() -> FileFaults:
    if not _instances:
        folder = tempfile.TemporaryDirectory(prefix="penstock-file-faults-")
        _instances.append(FileFaults(Path(folder.name)))
        _instances[0].keeps_alive = folder  # type: ignore[attr-defined]
    return _instances[0]


def _below(at: Path, path: str) -> str:
    return path.removeprefix(f"{at}/")


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"not finished after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="Run only every n-th case.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first case.")
    parser.add_argument(
        "--distinct", action="store_true", help="Run one of several calls on files of one kind."
    )
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the bits depend on the number of threads
    faults, bad, started = _shared(), 0, time.monotonic()
    cases = faults.cases(arguments.scenario or SCENARIOS, distinct=arguments.distinct)
    cases = cases[arguments.first :: arguments.every]
    for case in cases:
        outcome = faults.run_case(**case)
        if outcome.problem:
            bad += 1
            print(f"{outcome}\n{outcome.message}", flush=True)
    seconds = time.monotonic() - started
    print(f"{len(cases)} cases, {bad} bad, {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
