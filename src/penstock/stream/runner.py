"""Carries a program out: lanes move, the caller's thread computes. Room: move."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from penstock.schedule import COMPUTE, Operation, Verb
from penstock.stream.computing import Computer
from penstock.stream.lanes import Job, Lanes
from penstock.stream.moving import Mover
from penstock.stream.program import INSTANT
from penstock.stream.state import Run, Taken
from penstock.stream.watching import Passed, passed_of, tell_began, tell_passed

LANES = ("read", "sweep", "write", "fetch", "fetch inputs", "drain", "drain inputs")

Progress = Callable[[int, int, str], None]


class Runner:
    """One per engine. `run` returns when every operation has ended, or raises the first failure
    once nothing uses a buffer any more."""

    def __init__(self, taken: Taken, computer: Computer, mover: Mover) -> None:
        self._taken, self._computer, self._mover = taken, computer, mover
        self._lanes = Lanes(LANES, taken.device)
        self._names = [block.name for block in taken.homes.inventory.blocks]
        self._now: Run | None = None
        self.on_progress: Progress | None = None
        self._latest: Run | None = None

    def run(self, run: Run) -> None:
        try:
            self._run(run)
        finally:
            self._mover.end_sweeps()  # also when a second Ctrl-C has ended all other waiting

    def _run(self, run: Run) -> None:
        jobs: dict[str, list[Job]] = {name: [] for name in LANES}
        for at, op in enumerate(run.program.operations):
            if (lane := op.lane) in jobs:
                jobs[lane].append(self._job(run, at, op))
        self._now = run
        tell_began(run)
        self._taken.device.settle()  # what was written between steps, on no lane
        run.origin = self._taken.device.mark()
        idle = self._lanes.start(jobs, run.marks)
        try:
            with self._taken.device.lane("compute"):
                self._compute(run)
        except BaseException as error:
            run.marks.fail(error)
        for event in idle:
            self._insist(run, partial(_until_set, event))
        self._settle(run)
        if run.marks.failed is not None:
            self._mend(run)
        self._now = None
        tell_passed(self._taken, run)
        if run.marks.failed is not None:
            raise run.marks.failed
        self._latest = run

    def waiting(self) -> str:
        """What threads wait for right now, in words."""
        run = self._now
        if run is None:
            return ""
        return "; ".join(sorted({self._words(run, key) for key in run.marks.waiting()}))

    def latest(self) -> Passed | None:
        """The last run that ended well: what the time line is read from."""
        return None if self._latest is None else passed_of(self._taken, self._latest)

    def close(self) -> None:
        self._lanes.close()
        self._mover.end_sweeps()
        self._latest = None

    def _compute(self, run: Run) -> None:
        self._computer.start()
        total = len(run.program.operations)
        for at, op in enumerate(run.program.operations):
            if op.verb in INSTANT:
                continue
            if op.verb in COMPUTE or op.gpu:
                if self.on_progress is not None:
                    self.on_progress(at, total, f"{op.verb} {self._names[op.block]}")
                self._computer.compute(run, at, op)
            else:
                self._computer.note(run, at, op)

    def _job(self, run: Run, at: int, op: Operation) -> Job:
        mover = self._mover
        work = {
            "read": mover.read,
            "sweep": mover.sweep,
            "write": mover.write,
            "fetch": mover.fetch,
            "fetch inputs": mover.fetch_inputs,
            "drain": mover.drain,
            "drain inputs": mover.drain_inputs,
        }[op.lane]
        return lambda: work(run, at, op)

    def _settle(self, run: Run) -> None:
        """Wait for all that was issued; after a failure, without complaint."""
        for mark in [*run.marks.issued(), *run.swept]:
            self._insist(run, mark.settle)

    def _mend(self, run: Run) -> None:
        """After a failure, when nothing moves any more: what was swept in staging still goes to its
        disk, where it would be lost otherwise, and pipes are empty for the next run."""
        for pipe in self._taken.pipes.values():
            pipe.abandon()
        for at, op in enumerate(run.program.operations):
            swept = op.verb is Verb.WRITE and (op.block, op.piece) in run.swept_now
            if swept and not run.marks.has(at):
                self._insist(run, partial(self._mover.write_now, run, at, op))

    def _insist(self, run: Run, wait: Callable[[], None]) -> None:
        """What others still use must not be left behind, so the first Ctrl-C only ends the run; the
        second one ends the waiting too."""
        try:
            wait()
        except Exception as error:
            run.marks.fail(error)
        except BaseException as error:
            again = run.marks.failed is not None
            run.marks.fail(error)
            if again:
                raise
            self._insist(run, wait)

    def _words(self, run: Run, key: object) -> str:
        at = key[0] if isinstance(key, tuple) else key
        if not isinstance(at, int):
            return str(key)
        op = run.program.operations[at]
        what = f" ({', '.join(op.roles)})" if op.roles and op.verb is not Verb.SWEEP else ""
        return f"{op.verb} of {self._names[op.block]}{what}"


def _until_set(event: threading.Event) -> None:
    while not event.wait(0.2):  # in slices, so that Ctrl-C is seen
        pass
