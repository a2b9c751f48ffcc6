"""Record how long each phase of a start takes, from the beginning to the end of the first step."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.machine.sysfs import System

IMPORT = "import"
"""The interpreter, and the modules that it imports."""
SURVEY = "survey"
"""The model's config, blocks and tensors, and the headers of its files."""
DATA = "data"
"""Tokenizing and packing, in `penstock train`."""
PLAN = "plan"
DEVICE = "device"
"""The device's context."""
MODEL = "model"
"""The model's modules, without weights."""
SELF_CHECK = "self-check"
REHEARSAL = "rehearsal"
"""Includes the compilation of layers."""
HBM = "HBM"
HOST = "host memory"
"""Mapping host memory and touching all its pages."""
STORE = "store"
"""Files on NVMe."""
WEIGHTS = "weights"
STATES = "optimizer states"
PIN = "pin"
"""Waiting for host memory to be registered with CUDA. It runs while weights are read."""
EVALUATION = "evaluation"
"""The evaluation before the first step, in `penstock train`."""
FIRST_STEP = "first step"
OTHER = "other"
"""The time outside of all phases."""


class Phase(NamedTuple):
    """One phase of a start."""

    name: str
    start: float
    """Seconds from the beginning of the record to the first entry of the phase."""
    seconds: float
    """Seconds in the phase, without those in phases inside of it."""


class StartUp:
    """The phases of one start.

    Every moment belongs to one phase: the innermost that is open, or `OTHER`. So the seconds of all
    phases add up to the time that has passed. A phase may be entered several times. Only the thread
    that created the record adds to it: what other threads do concurrently is not waited for.

    Args:
        before: Seconds that had passed when the record was created. They count as `IMPORT`.
        clock: Returns seconds.
    """

    def __init__(
        self, before: float = 0.0, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock, self._thread = clock, threading.get_ident()
        self._mark = clock()
        self._began = self._mark - before
        self._open: list[str] = []
        self._starts: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self.complete = False
        """Whether the first step has ended. Nothing is added to the record afterwards."""
        if before > 0:
            self._starts[IMPORT], self._seconds[IMPORT] = 0.0, before

    @classmethod
    def of_process(cls) -> StartUp:
        """Return a record that begins with the process. All that was done so far is `IMPORT`."""
        return cls(process_age())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as a phase."""
        if self.complete or threading.get_ident() != self._thread:
            yield
            return
        self._charge()
        self._starts.setdefault(name, self._mark - self._began)
        self._seconds.setdefault(name, 0.0)
        self._open.append(name)
        try:
            yield
        finally:
            if not self.complete:
                self._charge()
            self._open.pop()

    def end(self) -> None:
        """Close the record, after the first step."""
        if not self.complete:
            self._charge()
            self.complete = True

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end of the record, or to the last change of phase."""
        return self._mark - self._began

    @property
    def phases(self) -> list[Phase]:
        """The phases in the order of their first entry, then `OTHER`."""
        names = [name for name in self._seconds if name != OTHER]
        found = [Phase(name, self._starts[name], self._seconds[name]) for name in names]
        rest = self._seconds.get(OTHER, 0.0)
        return [*found, Phase(OTHER, 0.0, rest)] if rest else found

    def by_name(self) -> dict[str, float]:
        """Return the seconds of each phase, rounded to milliseconds."""
        return {phase.name: round(phase.seconds, 3) for phase in self.phases}

    def _charge(self) -> None:
        """Add the time since the last change of phase to the phase that is open."""
        now = self._clock()
        name = self._open[-1] if self._open else OTHER
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now


def process_age(system: System | None = None) -> float:
    """Return the seconds since this process was started; 0 if the kernel does not report it."""
    # The name of the program, in parentheses, may contain spaces. The field after it is number 3.
    stat = (system or System()).text("proc/self/stat") or ""
    fields = stat.rpartition(")")[2].split()
    try:
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (IndexError, ValueError, OSError):
        return 0.0
