"""Threads that issue work, one per lane. Room: move.

Copies, reads and sweeps wait for one another on the host; the thread that computes must not. So
each lane has a thread of its own, asleep between steps, which carries its jobs out in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from penstock.engine.allocate import EngineMemory, StepState
from penstock.engine.compute import Computer
from penstock.engine.device import Device
from penstock.engine.marks import Marks, StoppedError
from penstock.engine.program import INSTANT
from penstock.engine.step_records import StepRecord, passed_of, tell_began, tell_passed
from penstock.engine.transfer import Mover
from penstock.plan.schedule import COMPUTE, Operation, Verb

Job = Callable[[], None]


class Lane:
    """One thread. After a failure the jobs that are left of the run are not begun."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device
        self._runs: queue.SimpleQueue[tuple[Sequence[Job], Marks, threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=f"penstock {name}", daemon=True)
        self._thread.start()

    def start(self, jobs: Sequence[Job], marks: Marks) -> threading.Event:
        """Carry them out; the event is set when the thread is idle again."""
        idle = threading.Event()
        self._runs.put((jobs, marks, idle))
        return idle

    def close(self) -> None:
        self._runs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (run := self._runs.get()) is not None:
            jobs, marks, idle = run
            try:
                with self._device.lane(self.name):
                    for job in jobs:
                        if marks.failed is not None:
                            break
                        job()
            except StoppedError:
                pass
            except BaseException as error:
                marks.fail(error)
            idle.set()


class Lanes:
    """All of them, made once."""

    def __init__(self, names: Sequence[str], device: Device) -> None:
        self._lanes = {name: Lane(name, device) for name in names}

    def start(self, jobs: dict[str, list[Job]], marks: Marks) -> list[threading.Event]:
        return [self._lanes[name].start(todo, marks) for name, todo in jobs.items() if todo]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


# --------
# Carries a program out: lanes move, the caller's thread computes. Room: move.

LANES = ("read", "sweep", "write", "fetch", "fetch inputs", "drain", "drain inputs")

Progress = Callable[[int, int, str], None]


class Runner:
    """One per engine. `run` returns when every operation has ended, or raises the first failure
    once nothing uses a buffer any more."""

    def __init__(self, taken: EngineMemory, computer: Computer, mover: Mover) -> None:
        self._taken, self._computer, self._mover = taken, computer, mover
        self._lanes = Lanes(LANES, taken.device)
        self._names = [block.name for block in taken.homes.inventory.blocks]
        self._now: StepState | None = None
        self.on_progress: Progress | None = None
        self._latest: StepState | None = None

    def run(self, run: StepState) -> None:
        try:
            self._run(run)
        finally:
            self._mover.end_sweeps()  # also when a second Ctrl-C has ended all other waiting

    def _run(self, run: StepState) -> None:
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

    def latest(self) -> StepRecord | None:
        """The last run that ended well: what the time line is read from."""
        return None if self._latest is None else passed_of(self._taken, self._latest)

    def close(self) -> None:
        self._lanes.close()
        self._mover.end_sweeps()
        self._latest = None

    def _compute(self, run: StepState) -> None:
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

    def _job(self, run: StepState, at: int, op: Operation) -> Job:
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

    def _settle(self, run: StepState) -> None:
        """Wait for all that was issued; after a failure, without complaint."""
        for mark in [*run.marks.issued(), *run.swept]:
            self._insist(run, mark.settle)

    def _mend(self, run: StepState) -> None:
        """After a failure, when nothing moves any more: what was swept in staging still goes to its
        disk, where it would be lost otherwise, and pipes are empty for the next run."""
        for pipe in self._taken.pipes.values():
            pipe.abandon()
        for at, op in enumerate(run.program.operations):
            swept = op.verb is Verb.WRITE and (op.block, op.piece) in run.swept_now
            if swept and not run.marks.has(at):
                self._insist(run, partial(self._mover.write_now, run, at, op))

    def _insist(self, run: StepState, wait: Callable[[], None]) -> None:
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

    def _words(self, run: StepState, key: object) -> str:
        at = key[0] if isinstance(key, tuple) else key
        if not isinstance(at, int):
            return str(key)
        op = run.program.operations[at]
        what = f" ({', '.join(op.roles)})" if op.roles and op.verb is not Verb.SWEEP else ""
        return f"{op.verb} of {self._names[op.block]}{what}"


def _until_set(event: threading.Event) -> None:
    while not event.wait(0.2):  # in slices, so that Ctrl-C is seen
        pass
