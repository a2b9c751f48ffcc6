"""Exact steps: torch's profiler for the steps that were asked for. Room: show."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from penstock.observe.kineto import MARK, events_of
from penstock.observe.records import Event
from penstock.observe.tracker import Stretch

TRACE = ".exact.json"


class ExactSteps:
    """Profiles whole steps, in the thread that trains; what it found is read in the recorder's."""

    def __init__(
        self,
        steps: Collection[int],
        folder: Path,
        origin: float,
        put: Callable[[Callable[[], None]], None],
        write: Callable[[list[Event]], None],
        note: Callable[[str], None],
    ) -> None:
        self._steps = set(steps)
        self._folder, self._origin = folder, origin
        self._put, self._write, self._note = put, write, note
        self._profiler: Any = None
        self._step = 0
        self._marked = 0.0
        self._stretches: list[Stretch] = []

    def begin(self, step: int) -> None:
        """A step begins: the one before has ended."""
        self.end()
        if step not in self._steps:
            return
        try:
            self._start(step)
        except Exception as failed:  # somebody else profiles
            self._profiler = None
            self._note(f"step {step} was not profiled: {failed}")

    def heard(self, stretch: Stretch) -> None:
        if self._profiler is not None:
            self._stretches.append(stretch)

    def end(self) -> None:
        """Stop, where a step is being profiled. The GPU finishes what it has."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        step, marked, stretches = self._step, self._marked, self._stretches
        try:
            profiler.stop()
        except Exception as failed:
            self._note(f"step {step} was not profiled: {failed}")
            return
        self._put(lambda: self._read(profiler, step, marked, stretches))

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

    def _read(self, profiler: Any, step: int, marked: float, stretches: list[Stretch]) -> None:
        path = self._folder / TRACE
        try:
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            found = events_of(trace, marked - self._origin, step, self._phase_at(stretches))
        except (RuntimeError, ValueError, KeyError) as failed:
            self._note(f"what was profiled of step {step} cannot be read: {failed}")
            return
        finally:
            path.unlink(missing_ok=True)
        self._write(found)

    def _phase_at(self, stretches: list[Stretch]) -> Callable[[float], str | None]:
        """By the host's clock: a copy belongs to the phase that asked for it."""
        spans = [
            (s.start.host - self._origin, s.end.host - self._origin, s.name) for s in stretches
        ]

        def phase_at(at: float) -> str | None:
            return next((name for start, end, name in spans if start <= at < end), None)

        return phase_at
