"""`penstock.observe`: record the current program into a directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from penstock.machine.machine import Machine
from penstock.observe.engine_events import EngineWatcher
from penstock.observe.errors import ObserveError
from penstock.observe.hardware import ceilings, describe_hardware
from penstock.observe.hooks import Hooks
from penstock.observe.phase_tracker import TorchClock
from penstock.observe.recorder import INTERVAL, Recorder, command_line, now, wall_clock
from penstock.observe.records import Observation
from penstock.observe.run_files import LIMIT, read_run
from penstock.observe.samplers import (
    CoreLoad,
    DiskTraffic,
    GpuDriver,
    MachineMemory,
    NodeMemory,
    ProcessMemory,
    Sampler,
    TierMemorySampler,
    TorchMemory,
)
from penstock.observe.torch_profiler import ExactSteps
from penstock.observe.trace import TRACE_FILE, write_trace
from penstock.units import MiB, parse_bytes

MIN_INTERVAL = 0.005
"""Shortest time between samples that can be requested, in seconds."""

MAX_TRACED = 32 * MiB
"""Largest recording for which the trace is written as soon as the program ends. A larger one would
delay the program's exit; `finish` writes it without a limit."""


def observe(
    path: str | Path,
    *,
    interval: float = INTERVAL,
    exact: Collection[int] = (),
    limit: int | str = LIMIT,
    machine: str | Path | None = None,
) -> Observer:
    """Record where memory and time go in this program, into a directory.

        with penstock.observe("run/") as obs:
            train()

    This works with any PyTorch program. Forward, backward and update are detected automatically,
    or you can name them with `obs.phase("forward")` and `obs.step()`. `penstock report run/`
    shows the result.

    Args:
        path: Directory to write. Files of an earlier run in it are deleted.
        interval: Seconds between samples of memory, disks and cores.
        exact: Steps, counted from 1, in which every copy to and from the GPU is recorded. These
            steps run slower.
        limit: Maximum size of the directory, such as `256MiB`.
        machine: File that `penstock probe` wrote. The report compares traffic with the link speeds
            in it.
    """
    return Observer(path, interval=interval, exact=exact, limit=limit, machine=machine)


class Observer:
    """Records the program while it is used as a context manager. Created by `observe`."""

    def __init__(
        self,
        path: str | Path,
        *,
        interval: float = INTERVAL,
        exact: Collection[int] = (),
        limit: int | str = LIMIT,
        machine: str | Path | None = None,
    ) -> None:
        check_options(interval, exact)
        self.path = Path(path)
        self._interval, self._exact = interval, tuple(sorted(set(exact)))
        self._limit = parse_bytes(limit)
        self._ceilings = ceilings(Machine.load(machine)) if machine is not None else {}
        self._origin: float | None = None
        self._samples_machine = True
        self._recorder: Recorder | None = None
        self._closing: list[Callable[[], None]] = []

    def within(self, origin: float) -> Self:
        """Record only this process, as part of a run whose machine another process samples.

        `origin` is the run's origin of time, which all of its processes share.
        """
        self._origin, self._samples_machine = origin, False
        return self

    @property
    def origin(self) -> float:
        """The origin of time of a recording that has started."""
        return self._running().origin

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop("exit" if kind is None else kind.__name__)

    def start(self) -> None:
        """Start recording."""
        tiers = TierMemorySampler()
        recorder = self._make_recorder(tiers)
        recorder.step_selector.always = frozenset(self._exact)
        self._exact_steps = ExactSteps(self._exact, recorder)
        recorder.on_phase.append(self._exact_steps.add_phase)
        watcher = EngineWatcher(recorder, tiers)
        watcher.attach()
        # The program may import an engine later.
        recorder.before_sample.append(watcher.attach)
        hooks = Hooks(recorder.tracker, recorder.note)
        self._closing += [hooks.remove, watcher.close]
        self._recorder = recorder.start()
        self._exact_steps.begin(1)

    def stop(self, ended_by: str = "exit") -> None:
        """Write the remaining records, and undo every change to the program."""
        recorder = self._recorder
        if recorder is None or recorder.ended:
            return
        recorder.tracker.close()
        self._exact_steps.end()
        for close in reversed(self._closing):
            close()
        recorder.stop(ended_by)
        if self._samples_machine:  # otherwise `penstock profile` does it for the whole run
            write_small_trace(self.path)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record everything inside a `with` block as one phase with this name."""
        return self._running().tracker.named_phase(name)

    def step(self) -> None:
        """Mark the end of a step. Without it, every optimizer update ends a step."""
        self._running().tracker.next_step()

    def _make_recorder(self, tiers: TierMemorySampler) -> Recorder:
        samplers: list[Sampler] = [TorchMemory(), ProcessMemory(), tiers]
        hardware = describe_hardware()
        origin = now() if self._origin is None else self._origin
        if self._samples_machine:
            gpus = GpuDriver()
            self._closing.append(gpus.close)
            samplers += [MachineMemory(), NodeMemory(), DiskTraffic(hardware.disks), CoreLoad()]
            samplers.append(gpus)
        return Recorder(
            self.path,
            samplers,
            interval=self._interval,
            limit=self._limit,
            clock=TorchClock(origin),
            origin=origin,
            observation=Observation(
                began=wall_clock(origin),
                command=command_line(),
                pid=os.getpid(),
                mode="exact" if self._exact else "sampling",
                hardware=hardware,
                ceilings=self._ceilings,
            ),
            on_step=self._on_step,
        )

    def _on_step(self, step: int) -> None:
        self._exact_steps.begin(step)

    def _running(self) -> Recorder:
        if self._recorder is None:
            raise ObserveError(
                "",
                "is not recording yet; use it inside `with penstock.observe(...) as obs:`",
                where="obs",
            )
        return self._recorder


def check_options(interval: float, exact: Collection[int]) -> None:
    """Raise ObserveError if the interval is too short or a step number is invalid."""
    if not interval >= MIN_INTERVAL:
        raise ObserveError("interval", f"must be at least {MIN_INTERVAL} seconds, got {interval}")
    wrong = [step for step in exact if not isinstance(step, int) or step < 1]
    if wrong:
        raise ObserveError(
            "exact", f"must be step numbers counted from 1, got {', '.join(map(str, wrong))}"
        )


def write_small_trace(path: str | Path) -> None:
    """Write the trace if the recording is small. A failure to write must not fail the program."""
    recorded = sum(file.stat().st_size for file in Path(path).glob("*.jsonl"))
    if recorded <= MAX_TRACED:
        with contextlib.suppress(OSError, ObserveError):
            write_trace(read_run(path), Path(path) / TRACE_FILE)


def finish(path: str | Path) -> str:
    """Write the trace of a finished run, and return a line that summarizes the run."""
    run = read_run(path)
    write_trace(run, Path(path) / TRACE_FILE)
    observation = run.observation
    steps = len({phase.step for phase in run.phases} - {None})
    ended_by = observation.ended_by
    ended = "" if ended_by in (None, "exit") else f", ended by {ended_by}"
    notes = "".join(f"\n  {note}" for note in run.notes)
    return (
        f"{path}: recorded {observation.ended or 0:.1f} s{ended}, {steps} steps, "
        f"{len(run.samples)} samples; run `penstock report {path}` to see the report{notes}"
    )
