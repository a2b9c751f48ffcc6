"""Kill training at random moments and at every call that changes a file, and resume it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaign.file_calls import watch_calls
from tests.campaign.forks import Fork, penstock
from tests.campaign.results import Verdict
from tests.campaign.tiny_runs import LIMITS, TinyRuns, saved_step

CASES = 500

AGAIN = 0.25
"""Share of the cases in which the resumed run is killed, too."""


class Kills:
    """Kills runs and resumes them. Half of the kills are at calls, the others at any moment."""

    def __init__(self, folder: Path) -> None:
        self.runs = TinyRuns(folder)
        self.calls = self._count_calls()
        self.seconds = self._measure()

    def _count_calls(self) -> list[str]:
        """Return the names of the calls of an uninterrupted run that change files."""
        here = self._new_case()
        listed = here / "calls.txt"
        real_open = os.open

        def count() -> None:
            file = real_open(listed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            write = os.write
            watch_calls(
                lambda number, name, real, args: write(file, f"{name}\n".encode()) and None,
                lambda number: None,
            )

        ended = self.runs.start(self.runs.flags(here / "out"), here, count).end()
        assert ended.code == 0, ended.errors
        return listed.read_text().split()

    def _measure(self) -> float:
        here = self._new_case()
        start = time.monotonic()
        self.runs.start(self.runs.flags(here / "out"), here).end()
        return time.monotonic() - start

    def _new_case(self) -> Path:
        shutil.rmtree(self.runs.case, ignore_errors=True)
        self.runs.case.mkdir()
        return self.runs.case

    def run(self, seed: int, number: int) -> Verdict:
        rng = random.Random(f"{seed} {number}")
        here = self._new_case()
        out = here / "out"
        disk = here / "disk" if rng.random() < 0.3 else None
        if disk is not None:
            disk.mkdir()
        saved, done = 0, []
        command = self.runs.flags(out, disk=disk)
        for _ in range(1 + (rng.random() < AGAIN)):
            if number % 2:
                what, step = self._kill_at_call(command, here, rng, number // 2)
            else:
                what, step = self._kill_at_moment(command, here, rng)
            done.append(what)
            saved = max(saved, step)
            if (out / "run.yaml").exists():
                command = ["train", "--out", str(out), "--resume", "--json"]
        verdict = self.runs.check(self.runs.resume(out, here, disk=disk), out, saved)
        return Verdict(verdict.outcome, f"{'; '.join(done)}: {verdict.detail}".rstrip(": "))

    def _kill_at_call(
        self, command: list[str], here: Path, rng: random.Random, index: int
    ) -> tuple[str, int]:
        """Kill before, after or within a call. The calls take turns, from a random first one."""
        if "--resume" in command:  # a resumed run has fewer calls
            target = rng.randrange(len(self.calls))
        else:
            target = index * len(self.calls) * 3 // CASES * 2 % (len(self.calls) * 3)
            target = (target + rng.randrange(3 * len(self.calls) * 2 // CASES + 1)) // 3
            target %= len(self.calls)
        when = rng.choice(("before", "within", "after"))

        def before(number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
            if number == target and when != "after":
                if when == "within":
                    _tear(name, real, args)
                os.kill(os.getpid(), signal.SIGKILL)

        def after(number: int) -> None:
            if number == target:
                os.kill(os.getpid(), signal.SIGKILL)

        ended = self.runs.start(command, here, lambda: watch_calls(before, after)).end()
        return f"killed {when} call {target} ({self.calls[target]})", saved_step(ended.output)

    def _kill_at_moment(
        self, command: list[str], here: Path, rng: random.Random
    ) -> tuple[str, int]:
        moment = rng.uniform(0, self.seconds)
        fork = Fork(penstock(command), here, LIMITS)
        fork.wait(moment)
        fork.kill()
        return f"killed after {moment:.3f} s", saved_step(fork.end().output)


def _tear(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Do half of a write."""
    if name in ("write", "pwrite"):
        fd, data, *rest = args
        real(fd, memoryview(data)[: len(data) // 2], *rest)
