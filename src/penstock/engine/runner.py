"""Run a program: one thread per lane moves data, the calling thread computes.

A lane is a thread that issues one kind of work in the order of the schedule. Copies, reads and
sweeps wait for one another on the host, and the thread that launches kernels must not: a copy of
fresh weights can be issued only after a sweep on the CPU has ended, for example. Lanes find each
other's work on the step's `TicketBoard`. The order within each lane is fixed by the schedule, so
the lanes cannot deadlock unless the schedule itself is wrong.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.engine.allocate import EngineMemory
from penstock.engine.compute import Computer
from penstock.engine.determinism import deterministic_kernels, leave_deterministic_kernels
from penstock.engine.device import Device
from penstock.engine.program import INSTANT
from penstock.engine.rank_exchange import RankExchange
from penstock.engine.step_records import (
    StepRecord,
    notify_finished,
    notify_started,
    record_step,
)
from penstock.engine.step_state import StepState
from penstock.engine.ticket_board import RECHECK_SECONDS, StoppedError, TicketBoard
from penstock.engine.transfer import Mover
from penstock.plan.schedule import Operation, Verb

SWITCH_SECONDS = 2e-4
"""How long a thread may keep the interpreter's lock while others wait for it, during a step. With
Python's default of 5 ms, the thread that launches kernels waited that long whenever a lane was
preparing sweeps or copies, and the GPU had nothing to do."""

LANES = (
    *("read", "sweep", "write", "fetch", "fetch inputs", "drain", "drain inputs", "ranks"),
    *("fetch states", "gpu sweep", "drain states", "fetch attention", "drain attention"),
)
"""Lanes with a thread of their own; the calling thread serves the lane `compute`."""


class LaneWork(NamedTuple):
    """What a lane does in one step."""

    carry_out: Callable[[int, Operation], None]
    """Carries out one operation, given its index in the program."""

    operations: Sequence[tuple[int, Operation]]
    """The lane's operations, in the order of the schedule."""


class _ShortSwitchInterval:
    """Shortens Python's switch interval while any engine of the process makes a step.

    Ctrl-C may end `start` or `stop` anywhere, so both may be repeated.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._before = 0.0

    def start(self, user: object) -> None:
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
            self._users.add(user)
            sys.setswitchinterval(min(self._before, SWITCH_SECONDS))

    def stop(self, user: object) -> None:
        with self._lock:
            if self._users == {user}:
                sys.setswitchinterval(self._before)
            self._users.discard(user)


_short_switch_interval = _ShortSwitchInterval()
_NOTHING = LaneWork(lambda at, operation: None, ())


Progress = Callable[[int, int, str], None]
"""Called with the index of an operation, the number of operations, and a description."""


class Runner:
    """Runs the programs of one engine, one at a time.

    `run` returns when every operation has finished. After a failure it raises the first error, but
    only once nothing uses a buffer any more.
    """

    def __init__(
        self, memory: EngineMemory, computer: Computer, mover: Mover, exchange: RankExchange
    ) -> None:
        self._memory, self._computer, self._mover = memory, computer, mover
        self._exchange = exchange
        self._lanes = {name: Lane(name, memory.device) for name in LANES}
        self._deterministic = memory.tiers.plan.workload.numerics.deterministic
        self._block_names = [block.name for block in memory.tiers.inventory.blocks]
        self._current: StepState | None = None  # read by `waiting` from any thread
        self._latest: StepState | None = None
        self.on_progress: Progress | None = None

    def run(self, step: StepState) -> None:
        """Carry out the step's program."""
        try:
            _short_switch_interval.start(self)
            self._run(step)
        finally:
            try:
                # Even when a second Ctrl-C has ended all other waiting: a sweep writes to memory
                # that the caller may release next.
                self._mover.end_sweeps()
            finally:
                # `with` blocks inside have done all this, unless Ctrl-C came between the last line
                # of one and its end.
                self._computer.leave_modes()
                leave_deterministic_kernels(self)
                _short_switch_interval.stop(self)

    def _run(self, step: StepState) -> None:
        work = self._work(step)
        # Other ranks wait in collective calls for this one, and this one may wait for them.
        step.tickets.on_failure = self._memory.ranks.abort
        self._current = step
        notify_started(step)
        device = self._memory.device
        # Writes between steps are on no lane that this step waits for. With nothing running, the
        # clocks of host and device also agree at the origin (`Device.seconds_between`).
        device.synchronize()
        step.origin = device.record()
        idle: list[Idle] = []
        try:
            for name, todo in work.items():
                idle.append(self._lanes[name].start(todo, step.tickets))
            with device.lane("compute"), deterministic_kernels(self._deterministic, self):
                self._compute(step)
        except BaseException as error:
            step.tickets.fail(error)  # which also ends the lanes
            # Ctrl-C may have come between the start of a lane and its entry in `idle`. A lane that
            # has come to new work has ended that of this step.
            idle = [lane.start(_NOTHING, step.tickets) for lane in self._lanes.values()]
        # First the threads, since a lane that is not idle may still issue work; then their work.
        for lane in idle:
            self._wait_despite_interrupt(step, lane.wait)
        self._settle(step)
        step.saved.clear()  # after a failure, backward has not used all of it
        if step.tickets.failed is not None:
            self._clean_up(step)
        # Nothing uses a buffer from here on.
        self._current = None
        notify_finished(self._memory, step)
        if step.tickets.failed is not None:
            raise step.tickets.failed
        self._latest = step

    def waiting(self) -> str:
        """Describe what threads wait for right now; callable from any thread."""
        step = self._current
        if step is None:
            return ""
        return "; ".join(sorted({self._describe(step, key) for key in step.tickets.awaited_keys()}))

    def latest(self) -> StepRecord | None:
        """Return the record of the last step that succeeded."""
        return None if self._latest is None else record_step(self._memory, self._latest)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._mover.end_sweeps()
        self._latest = None

    def _work(self, step: StepState) -> dict[str, LaneWork]:
        """Return what each lane has to do."""
        mover = self._mover
        methods = {
            "read": mover.read,
            "sweep": mover.sweep,
            "write": mover.write,
            "fetch": mover.fetch,
            "fetch inputs": mover.fetch_activations,
            "drain": mover.offload_gradient,
            "drain inputs": mover.offload_activations,
            "ranks": self._exchange.run,
            "fetch states": mover.fetch_states,
            "gpu sweep": mover.sweep_states,
            "drain states": mover.offload_states,
            "fetch attention": mover.fetch_attention,
            "drain attention": mover.offload_attention,
        }
        return {
            name: LaneWork(partial(methods[name], step), operations)
            for name, operations in step.program.by_lane.items()
            if name in methods
        }

    def _compute(self, step: StepState) -> None:
        self._computer.start(step)
        total = len(step.program.operations)
        for at, op in enumerate(step.program.operations):
            if op.verb in INSTANT:
                continue
            if op.lane == "compute":
                if self.on_progress is not None:
                    self.on_progress(at, total, f"{op.verb} {self._block_names[op.block]}")
                self._computer.compute(step, at, op)
            else:
                self._computer.note(step, at, op)

    def _settle(self, step: StepState) -> None:
        """Block until all issued work has finished; record its failures."""
        for ticket in step.tickets.posted():
            self._wait_despite_interrupt(step, ticket.wait)
        sweeps = step.device_sweeps
        self._wait_despite_interrupt(step, partial(self._memory.device.fetch_results, sweeps))
        for ticket in sweeps:
            self._wait_despite_interrupt(step, ticket.wait)

    def _clean_up(self, step: StepState) -> None:
        """After a failure, when nothing moves any more: write swept pieces back and empty pipes.

        Pieces that were swept in staging memory exist nowhere else, and they count as swept:
        without the write the update would be lost. If that fails, or Ctrl-C ends it, nothing reads
        what they were before.
        """
        for pipe in self._memory.pipes.values():
            pipe.abandon()
        swept = [
            (at, op)
            for at, op in enumerate(step.program.operations)
            if op.verb is Verb.WRITE and step.program.read_of[at] in step.swept_in_staging
            if not step.tickets.has(at)
        ]
        try:
            while swept:
                at, op = swept[0]
                self._wait_despite_interrupt(step, partial(self._mover.write_back, step, at, op))
                del swept[0]
        finally:
            for at, op in swept:
                self._mover.note_lost(step, at, op, "the process was interrupted")

    def _wait_despite_interrupt(self, step: StepState, wait: Callable[[], object]) -> None:
        """Wait to the end even after one Ctrl-C: buffers in use must not be left behind.

        The first interrupt only fails the step. The second ends the waiting too.
        """
        try:
            wait()
        except Exception as error:
            step.tickets.fail(error)
        except BaseException as error:
            second = step.tickets.failed is not None
            step.tickets.fail(error)
            if second:
                raise
            self._wait_despite_interrupt(step, wait)

    def _describe(self, step: StepState, key: object) -> str:
        at = key[0] if isinstance(key, tuple) else key
        if not isinstance(at, int):
            return str(key)
        op = step.program.operations[at]
        roles = f" ({', '.join(op.roles)})" if op.roles and op.verb is not Verb.SWEEP else ""
        return f"{op.verb} of {self._block_names[op.block]}{roles}"


class Idle:
    """Says when a lane is idle again.

    A `threading.Event` is Python code: Ctrl-C inside its `wait` may leave its lock to nobody, and
    the lane would wait for that lock in `set` forever.
    """

    def __init__(self) -> None:
        self._is_idle = False
        self._wake = threading.Lock()
        self._wake.acquire()

    def set(self) -> None:
        """Wake the thread that waits. Called once."""
        self._is_idle = True
        self._wake.release()

    def wait(self) -> None:
        """Block until the lane is idle. May be called again if it was interrupted."""
        while not self._is_idle:
            self._wake.acquire(timeout=RECHECK_SECONDS)  # not longer, so that Ctrl-C is handled


class Lane:
    """One thread, asleep between steps, that carries out the operations of its lane in order.

    After a failure of any thread it does not begin the remaining operations of that step.
    """

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device
        self._steps: queue.SimpleQueue[tuple[LaneWork, TicketBoard, Idle] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=f"penstock {name}", daemon=True)
        self._thread.start()

    def start(self, work: LaneWork, tickets: TicketBoard) -> Idle:
        """Start the work; what is returned says when the thread is idle again."""
        idle = Idle()
        self._steps.put((work, tickets, idle))
        return idle

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (step := self._steps.get()) is not None:
            work, tickets, idle = step
            try:
                with self._device.lane(self.name):
                    for at, operation in work.operations:
                        if tickets.failed is not None:
                            break
                        work.carry_out(at, operation)
            except StoppedError:
                pass  # the failure of another thread, which is on the board
            except BaseException as error:
                tickets.fail(error)  # `Runner.run` raises it in the caller's thread
            idle.set()
