"""Record a program while it runs: one background thread samples and writes.

The program's own threads only take timestamps and append to a queue. If recording fails, it ends
with one warning; the program is never interrupted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from penstock.observe.phase_tracker import Clock, HostClock, PendingPhase, PhaseTracker
from penstock.observe.records import Event, Observation, Phase, Sample
from penstock.observe.redaction import redact
from penstock.observe.run_files import LIMIT, RunFolder
from penstock.observe.samplers import Sampler, Samplers
from penstock.observe.step_selector import StepSelector

INTERVAL = 0.1
"""Default number of seconds between samples."""

MAX_INTERVAL = 1.0
"""Seconds between samples at most, when sampling is slowed down."""

QUEUE = 20_000
"""Number of phases and jobs that can wait to be written. Further ones are counted and dropped."""

FLUSH = 0.5
"""Seconds after which recorded data is on disk."""

MAX_NOTES = 100

CPU_SHARE, CPU_WINDOW = 0.02, 2.0
"""Fraction of one core that taking samples may use, measured over a window of this many seconds.
Above it, samples are taken less often. Writing the events of an exact step is not counted, because
fewer samples would not make it cheaper."""

Job = Callable[[], None]


class Recorder:
    """Records one run, from `start` to `stop`.

    `note`, `put` and the tracker can be called from any thread. `deque.append` and `popleft` are
    atomic, so the queue needs no lock. The folder and the step selector belong to the recorder's
    thread while it runs; `stop` uses them after the thread has ended.
    """

    def __init__(
        self,
        path: str | Path,
        samplers: Iterable[Sampler],
        *,
        interval: float = INTERVAL,
        limit: int = LIMIT,
        clock: Clock | None = None,
        origin: float | None = None,
        observation: Observation | None = None,
        on_step: Callable[[int], None] = lambda step: None,
        outside: bool = False,
        clears: bool = True,
    ) -> None:
        self.origin = time.perf_counter() if origin is None else origin
        observation = observation or Observation(began=wall_clock(self.origin), pid=os.getpid())
        self.folder = RunFolder(
            path, replace(observation, interval=interval), limit=limit, clears=clears
        )
        self.interval, self._requested_interval, self._outside = interval, interval, outside
        self._clock = clock or HostClock(self.origin)
        self._samplers = Samplers(list(samplers), self.note)
        self.tracker = PhaseTracker(self._clock, self._put_phase, on_step)
        self.step_selector = StepSelector(self.folder)
        self.engine_step = 0
        """The last step that a Penstock engine has begun."""
        self.before_sample: list[Job] = []
        """Functions that the recorder's thread calls before every sample."""
        self.on_phase: list[Callable[[PendingPhase], None]] = []
        """Functions that the program's thread calls with every phase that has ended."""
        self._queue: deque[PendingPhase | Job] = deque()
        self._pending: deque[PendingPhase] = deque()
        self._dropped = 0
        self._notes: list[str] = []
        self._saved_notes = 0
        self._failed = False
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock observe", daemon=True)
        self._cpu_seconds = self._sampling = 0.0
        self._flushed = self.origin
        self._window = (self.origin, 0.0)

    # Called by the program's threads.

    def start(self) -> Self:
        """Start the recorder's thread."""
        _active.add(self)
        self._thread.start()
        return self

    def put(self, job: Job) -> None:
        """Queue a function for the recorder's thread."""
        self._enqueue(job)

    def note(self, text: str) -> None:
        """Add a sentence that the report shows to its reader."""
        if len(self._notes) < MAX_NOTES and text not in self._notes:
            self._notes.append(text)

    def stop(self, ended_by: str = "exit", exit_code: int | None = None) -> None:
        """Write the remaining records and how the run ended. Only the first call has an effect."""
        if self._stop_requested.is_set():
            return
        self.tracker.close()
        self._stop_requested.set()
        if self._thread.is_alive():
            self._thread.join()
        _active.discard(self)
        if self._failed:
            return
        elapsed = time.perf_counter() - self.origin
        self._guarded(lambda: self._finish(elapsed, ended_by, exit_code))

    def abandon(self) -> None:
        """Stop without writing, in a forked child: fork does not copy the recorder's thread."""
        self._failed = True
        self._stop_requested.set()
        self.folder.abandon()

    @property
    def ended(self) -> bool:
        return self._stop_requested.is_set()

    def _put_phase(self, phase: PendingPhase) -> None:
        for callback in self.on_phase:
            callback(phase)
        self._enqueue(phase)

    def _enqueue(self, item: PendingPhase | Job) -> None:
        if self._failed:
            return
        if len(self._queue) >= QUEUE:
            self._dropped += 1
        else:
            self._queue.append(item)

    # Called by the recorder's thread.

    def update(self, **changes: Any) -> None:
        """Change fields of `observe.json`. Only for the recorder's thread."""
        self.folder.save(replace(self.folder.observation, **changes))

    def write_events(self, events: Iterable[Event]) -> None:
        """Write events. Only for the recorder's thread."""
        for event in events:
            self.folder.write(event)

    def _serve(self) -> None:
        due = time.perf_counter()
        while not self._stop_requested.wait(max(0.0, due - time.perf_counter())):
            if not self._guarded(self._record):
                return
            due = max(due + self.interval, time.perf_counter())
        self._cpu_seconds = time.thread_time()

    def _guarded(self, work: Job) -> bool:
        """Run a function; if it raises, warn and end the recording. Return whether it worked."""
        try:
            work()
        except Exception as failed:
            self._failed = True
            self.folder.abandon()
            self._queue.clear()
            reason = failed.strerror if isinstance(failed, OSError) else failed
            warnings.warn(
                f"{self.folder.path}: recording stopped ({reason or failed}); the program "
                f"continues. The records so far can be read",
                RuntimeWarning,
                stacklevel=2,
            )
        return not self._failed

    def _record(self) -> None:
        """Take one sample, and write what has been queued since the previous one."""
        cpu_before = time.thread_time()
        for job in self.before_sample:
            job()
        now = time.perf_counter()
        reading = self._samplers.read()
        self.folder.write(self._sample(reading, now))
        self._sampling += time.thread_time() - cpu_before
        self._write_queued()
        if now - self._flushed >= FLUSH:
            self._flushed = now
            self.folder.flush()
            self._save_notes()
            self._adjust_interval(now)

    def _sample(self, reading: Any, now: float) -> Sample:
        # Outside the program, neither step nor phase is known; `read_run` derives them by time.
        step = None if self._outside else self.tracker.step
        sample: Sample = reading.sample(now - self.origin, step, self.tracker.phase)
        return sample

    def _write_queued(self) -> None:
        """Run queued jobs, and write phases whose ends the GPU has reached."""
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, PendingPhase):
                self._pending.append(item)
            else:
                item()
        while self._pending:
            phase = self._pending[0]
            start, end = self._clock.seconds(phase.start), self._clock.seconds(phase.end)
            if start is None or end is None:
                break  # the GPU has not reached it yet, nor any phase behind it
            self._pending.popleft()
            self.folder.write(Phase(phase.name, phase.step, start, max(start, end)))

    def _adjust_interval(self, now: float) -> None:
        """Sample less often if sampling takes too much of a core, and more often again later."""
        then, spent_then = self._window
        if now - then < CPU_WINDOW:
            return
        share = (self._sampling - spent_then) / (now - then)
        self._window = (now, self._sampling)
        if share > CPU_SHARE and self.interval < MAX_INTERVAL and spent_then:
            self.interval = min(MAX_INTERVAL, 2 * self.interval)
            self.note(
                f"some samples are further apart than requested: sampling used more than "
                f"{CPU_SHARE:.0%} of a core"
            )
        elif share < CPU_SHARE / 4 and self.interval > self._requested_interval:
            self.interval = max(self._requested_interval, self.interval / 2)
        else:
            return
        self.update(interval=self.interval)

    def _save_notes(self) -> None:
        if len(self._notes) > self._saved_notes:
            self._saved_notes = len(self._notes)
            self.update(notes=tuple(self._notes))

    def _finish(self, elapsed: float, ended_by: str, exit_code: int | None) -> None:
        # Give the GPU one second to reach the end of the last phases.
        deadline = time.perf_counter() + 1.0
        self._write_queued()
        while self._pending and time.perf_counter() < deadline:
            time.sleep(0.01)
            self._write_queued()
        self.step_selector.close()
        self.folder.close()
        if self._dropped:
            self.note(
                f"{self._dropped} phases and events were dropped: they arrived faster than they "
                f"could be written"
            )
        share = self._cpu_seconds / elapsed if elapsed > 0 else None
        self.update(
            ended=elapsed,
            ended_by=ended_by,
            exit_code=exit_code,
            overhead=share,
            notes=tuple(self._notes),
        )


def now() -> float:
    """Return the clock that everything is recorded by; all processes of a machine share it."""
    return time.perf_counter()


def wall_clock(origin: float) -> str:
    """Convert a `time.perf_counter` value to wall-clock time in ISO format."""
    ago = time.perf_counter() - origin
    return datetime.fromtimestamp(time.time() - ago, UTC).isoformat().replace("+00:00", "Z")


def command_line() -> tuple[str, ...]:
    """Return the command that started this process, without likely secrets."""
    return redact(sys.orig_argv)


_active: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for recorder in list(_active):
        recorder.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
