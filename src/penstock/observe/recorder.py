"""Records a program while it runs: one thread samples and writes. Room: show.

The program's own threads only note moments and put them in a queue. Whatever goes wrong here ends
the recording with one warning, never the program.
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

from penstock.observe.observation import Observation
from penstock.observe.phase_tracker import Clock, HostClock, Stretch, Tracker
from penstock.observe.records import Event, Phase, Sample
from penstock.observe.run_files import LIMIT, RunFolder, StepSelector
from penstock.observe.samplers import Sampler, Samplers

INTERVAL = 0.1

QUEUE = 20_000
"""Moments that may wait to be written. What comes beyond is counted and left out."""

FLUSH = 0.5
"""Seconds after which what was recorded is on disk."""

SHARE, WATCHED = 0.02, 2.0
"""Of a core, for taking samples, over so many seconds. Where it takes more, samples become fewer.
Writing down what an exact step did is not counted: fewer samples would not make it less."""

Job = Callable[[], None]


class Recorder:
    """From `start` to `stop`. `note` and `put` may be called from any thread."""

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
        told = observation or Observation(began=wall_clock(self.origin), pid=os.getpid())
        self.folder = RunFolder(path, replace(told, interval=interval), limit=limit, clears=clears)
        self.interval, self._asked, self._outside = interval, interval, outside
        self._clock = clock or HostClock(self.origin)
        self._samplers = Samplers(list(samplers), self.note)
        self.tracker = Tracker(self._clock, self._put_stretch, on_step)
        self.keeper = StepSelector(self.folder)
        self.engine_step = 0
        """The last one that an engine of Penstock's own has begun."""
        self.on_tick: list[Job] = []
        """Called by the recorder's thread before every sample."""
        self.on_stretch: list[Callable[[Stretch], None]] = []
        """Called by the program's thread with every phase that has ended."""
        self._queue: deque[Stretch | Job] = deque()
        self._waiting: deque[Stretch] = deque()
        self._dropped = 0
        self._notes: list[str] = []
        self._told_notes = 0
        self._failed = False
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="penstock observe", daemon=True)
        self._cpu_seconds = self._sampling = 0.0
        self._flushed = self.origin
        self._watched = (self.origin, 0.0)

    # From the program's threads.

    def start(self) -> Self:
        _active.add(self)
        self._thread.start()
        return self

    def put(self, job: Job) -> None:
        """Something for the recorder's thread to do."""
        self._enqueue(job)

    def note(self, text: str) -> None:
        """Something for whoever reads the run."""
        if len(self._notes) < 100 and text not in self._notes:
            self._notes.append(text)

    def stop(self, ended_by: str = "exit", exit_code: int | None = None) -> None:
        """Write what is left, and how it ended. Only the first call counts."""
        if self._wanted.is_set():
            return
        self.tracker.close()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join()
        _active.discard(self)
        if self._failed:
            return
        elapsed = time.perf_counter() - self.origin
        self._guarded(lambda: self._finish(elapsed, ended_by, exit_code))

    def abandon(self) -> None:
        """In a forked child, where the thread is not."""
        self._failed = True
        self._wanted.set()
        self.folder.abandon()

    @property
    def ended(self) -> bool:
        return self._wanted.is_set()

    def update(self, **changes: Any) -> None:
        """Fields of `observe.json` that became known. For the recorder's thread."""
        self.folder.save(replace(self.folder.observation, **changes))

    def _put_stretch(self, stretch: Stretch) -> None:
        for tell in self.on_stretch:
            tell(stretch)
        self._enqueue(stretch)

    def _enqueue(self, item: Stretch | Job) -> None:
        if self._failed:
            return
        if len(self._queue) >= QUEUE:
            self._dropped += 1
        else:
            self._queue.append(item)

    # In the recorder's own.

    def _serve(self) -> None:
        due = time.perf_counter()
        while not self._wanted.wait(max(0.0, due - time.perf_counter())):
            if not self._guarded(self._tick):
                return
            due = max(due + self.interval, time.perf_counter())
        self._cpu_seconds = time.thread_time()

    def _guarded(self, work: Job) -> bool:
        """Whether it went well. If not, recording is over."""
        try:
            work()
        except Exception as failed:
            self._failed = True
            self.folder.abandon()
            self._queue.clear()
            reason = failed.strerror if isinstance(failed, OSError) else failed
            warnings.warn(
                f"{self.folder.path}: recording has ended ({reason or failed}); the program goes "
                f"on. What was recorded until then can be read",
                RuntimeWarning,
                stacklevel=2,
            )
        return not self._failed

    def _tick(self) -> None:
        began = time.thread_time()
        for job in self.on_tick:
            job()
        now = time.perf_counter()
        reading = self._samplers.read()
        self.folder.write(self._sample(reading, now))
        self._sampling += time.thread_time() - began
        self._drain()
        if now - self._flushed >= FLUSH:
            self._flushed = now
            self.folder.flush()
            self._tell_notes()
            self._slow_down(now)

    def _sample(self, reading: Any, now: float) -> Sample:
        """From outside, neither step nor phase is known: the reader finds them by the time."""
        step = None if self._outside else self.tracker.step
        sample: Sample = reading.sample(now - self.origin, step, self.tracker.phase)
        return sample

    def _drain(self) -> None:
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, Stretch):
                self._waiting.append(item)
            else:
                item()
        while self._waiting:
            stretch = self._waiting[0]
            start, end = self._clock.when(stretch.start), self._clock.when(stretch.end)
            if start is None or end is None:
                break  # the GPU is not there yet
            self._waiting.popleft()
            self.folder.write(Phase(stretch.name, stretch.step, start, max(start, end)))

    def _slow_down(self, now: float) -> None:
        then, spent_then = self._watched
        if now - then < WATCHED:
            return
        share = (self._sampling - spent_then) / (now - then)
        self._watched = (now, self._sampling)
        if share > SHARE and self.interval < 1.0 and spent_then:
            self.interval = min(1.0, 2 * self.interval)
            self.note("some samples are further apart than asked: they took too much of a core")
        elif share < SHARE / 4 and self.interval > self._asked:  # what took so long is over
            self.interval = max(self._asked, self.interval / 2)
        else:
            return
        self.update(interval=self.interval)

    def _tell_notes(self) -> None:
        if len(self._notes) > self._told_notes:
            self._told_notes = len(self._notes)
            self.update(notes=tuple(self._notes))

    def _finish(self, elapsed: float, ended_by: str, exit_code: int | None) -> None:
        deadline = time.perf_counter() + 1.0
        self._drain()
        while self._waiting and time.perf_counter() < deadline:
            time.sleep(0.01)
            self._drain()
        self.keeper.close()
        self.folder.close()
        if self._dropped:
            self.note(f"{self._dropped} moments came too fast to be written")
        share = self._cpu_seconds / elapsed if elapsed > 0 else None
        self.update(
            ended=elapsed,
            ended_by=ended_by,
            exit_code=exit_code,
            overhead=share,
            notes=tuple(self._notes),
        )

    def write_events(self, events: Iterable[Event]) -> None:
        """For the recorder's thread."""
        for event in events:
            self.folder.write(event)


def now() -> float:
    """The clock of all that is recorded; one for all processes of a machine."""
    return time.perf_counter()


def wall_clock(origin: float) -> str:
    """The time of day at a moment of `time.perf_counter`."""
    ago = time.perf_counter() - origin
    return datetime.fromtimestamp(time.time() - ago, UTC).isoformat().replace("+00:00", "Z")


_active: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _in_child() -> None:
    for recorder in list(_active):
        recorder.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def command_line() -> tuple[str, ...]:
    return tuple(sys.orig_argv)
