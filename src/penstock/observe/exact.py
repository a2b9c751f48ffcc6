"""Exact steps: torch's profiler for the steps that were asked for. Room: show."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from penstock.observe.kineto import MARK, events_of
from penstock.observe.recorder import Recorder
from penstock.observe.records import DRIVER, OBSERVING, Event, Phase
from penstock.observe.tracker import Stretch

TRACE = ".exact.json"


class ExactSteps:
    """Profiles whole steps, in the thread that trains. That thread also reads what was found, since
    reading would stop it anyway; the time it takes is told as a phase and is no step's."""

    def __init__(self, steps: Collection[int], recorder: Recorder) -> None:
        self._steps, self._recorder = set(steps), recorder
        self._profiler: Any = None
        self._step = 0
        self._marked = 0.0
        self._stretches: list[Stretch] = []

    def begin(self, step: int) -> None:
        """A step begins: the one before has ended."""
        began = time.perf_counter()
        if not self._end() and step not in self._steps:
            return
        if step in self._steps:
            try:
                self._start(step)
            except Exception as failed:  # somebody else profiles
                self._profiler = None
                self._recorder.note(f"step {step} was not profiled: {failed}")
        self._tell_phase(began)

    def heard(self, stretch: Stretch) -> None:
        if self._profiler is not None:
            self._stretches.append(stretch)

    def end(self) -> None:
        """Stop, where a step is being profiled."""
        began = time.perf_counter()
        if self._end():
            self._tell_phase(began)

    def _end(self) -> bool:
        """Whether a step was being profiled. The GPU finishes what it has."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return False
        try:
            profiler.stop()
            found = self._read(profiler)
        except Exception as failed:
            self._recorder.note(f"step {self._step} was not profiled: {failed}")
            return True
        recorder = self._recorder
        recorder.put(lambda: recorder.write_events(found))
        return True

    def _tell_phase(self, began: float) -> None:
        recorder, ended = self._recorder, time.perf_counter()
        told = Phase(OBSERVING, None, began - recorder.origin, ended - recorder.origin)
        recorder.put(lambda: recorder.folder.write(told))

    def _start(self, step: int) -> None:
        import torch

        wanted = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            wanted.append(torch.profiler.ProfilerActivity.CUDA)
        profiler: Any = torch.profiler.profile(activities=wanted, acc_events=True)
        profiler.start()
        self._profiler, self._step, self._stretches = profiler, step, []
        self._marked = time.perf_counter()
        with torch.profiler.record_function(MARK):
            pass

    def _read(self, profiler: Any) -> list[Event]:
        """An engine that tells its own copies has them told once: the driver's are beside them."""
        recorder, path = self._recorder, self._recorder.folder.path / TRACE
        try:
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        finally:
            path.unlink(missing_ok=True)
        marked = self._marked - recorder.origin
        found = events_of(trace, marked, self._step, self._phase_at(self._stretches))
        if self._step != recorder.engine_step:
            return found
        return [replace(event, track=DRIVER + event.track, link=None) for event in found]

    def _phase_at(self, stretches: list[Stretch]) -> Callable[[float], str | None]:
        """By the host's clock: a copy belongs to the phase that asked for it."""
        origin = self._recorder.origin
        spans = [(s.start.host - origin, s.end.host - origin, s.name) for s in stretches]

        def phase_at(at: float) -> str | None:
            return next((name for start, end, name in spans if start <= at < end), None)

        return phase_at
