"""What is made of a run when it has ended. Room: show."""

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
from penstock.observe.gpu_samplers import Cards
from penstock.observe.hardware import ceilings, hardware
from penstock.observe.hooks import Hooks
from penstock.observe.observation import Observation
from penstock.observe.phase_tracker import TorchClock
from penstock.observe.recorder import INTERVAL, Recorder, command_line, now, wall_clock
from penstock.observe.run_files import LIMIT, read_run
from penstock.observe.samplers import (
    Cores,
    Disks,
    Held,
    MachineMemory,
    NodeMemory,
    ProcessMemory,
    Sampler,
    TorchMemory,
)
from penstock.observe.torch_profiler import ExactSteps
from penstock.observe.trace import TRACE_FILE, write_trace
from penstock.units import MiB, parse_bytes

LARGEST = 32 * MiB
"""What a program that has just ended is made to wait for; `penstock report` renders more."""


def render(path: str | Path) -> None:
    """The trace, where it is made quickly. What cannot be written is no error of the program's."""
    recorded = sum(file.stat().st_size for file in Path(path).glob("*.jsonl"))
    if recorded <= LARGEST:
        with contextlib.suppress(OSError, ObserveError):
            write_trace(read_run(path), Path(path) / TRACE_FILE)


def finish(path: str | Path) -> str:
    """Render what can be; what became of it, in a line."""
    run = read_run(path)
    write_trace(run, Path(path) / TRACE_FILE)
    told = run.observation
    steps = len({phase.step for phase in run.phases} - {None})
    ended = "" if told.ended_by in (None, "exit") else f", ended by {told.ended_by}"
    notes = "".join(f"\n  {note}" for note in run.notes)
    return (
        f"{path}: {told.ended or 0:.1f} s{ended}, {steps} steps, {len(run.samples)} samples; "
        f"`penstock report {path}` shows them{notes}"
    )


# --------
# `penstock.observe`: everything put together for a program that is this one. Room: show.

LEAST_INTERVAL = 0.005


class Observer:
    """Made by `observe`; records from `with` to its end."""

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
        self._whole_machine = True
        self._recorder: Recorder | None = None
        self._closing: list[Callable[[], None]] = []

    def within(self, origin: float) -> Self:
        """As part of a run whose machine is sampled from outside, by one clock."""
        self._origin, self._whole_machine = origin, False
        return self

    # Recording.

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop("exit" if kind is None else kind.__name__)

    def start(self) -> None:
        held = Held()
        samplers: list[Sampler] = [TorchMemory(), ProcessMemory(), held]
        parts = hardware()
        origin = now() if self._origin is None else self._origin
        if self._whole_machine:
            cards = Cards()
            self._closing.append(cards.close)
            samplers += [MachineMemory(), NodeMemory(), Disks(parts.disks), Cores(), cards]
        recorder = Recorder(
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
                hardware=parts,
                ceilings=self._ceilings,
            ),
            on_step=self._on_step,
        )
        recorder.keeper.always = frozenset(self._exact)
        self._exact_steps = ExactSteps(self._exact, recorder)
        recorder.on_stretch.append(self._exact_steps.heard)
        watcher = EngineWatcher(recorder, held)
        watcher.look()
        recorder.on_tick.append(watcher.look)
        hooks = Hooks(recorder.tracker, recorder.note)
        self._closing += [hooks.remove, watcher.close]
        self._recorder = recorder.start()
        self._exact_steps.begin(1)

    def stop(self, ended_by: str = "exit") -> None:
        """Write what is left. Everything in the program is as it was before."""
        recorder = self._recorder
        if recorder is None or recorder.ended:
            return
        recorder.tracker.close()
        self._exact_steps.end()
        for close in reversed(self._closing):
            close()
        recorder.stop(ended_by)
        if self._whole_machine:  # otherwise whoever sees all of it does so
            render(self.path)

    # What a program may say.

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name what runs inside; what would be found there does not count."""
        return self._running().tracker.named(name)

    def step(self) -> None:
        """A step has ended. Without it, steps are counted by their updates."""
        self._running().tracker.next_step()

    def _on_step(self, step: int) -> None:
        self._exact_steps.begin(step)

    def _running(self) -> Recorder:
        if self._recorder is None:
            raise ObserveError("", "is not being recorded yet: use it within `with`", where="obs")
        return self._recorder


def check_options(interval: float, exact: Collection[int]) -> None:
    """ObserveError names the one that makes no sense."""
    if not interval >= LEAST_INTERVAL:
        raise ObserveError("interval", f"must be {LEAST_INTERVAL} s or more, got {interval}")
    wrong = [step for step in exact if not isinstance(step, int) or step < 1]
    if wrong:
        raise ObserveError("exact", f"steps count from 1, got {', '.join(map(str, wrong))}")


def observe(
    path: str | Path,
    *,
    interval: float = INTERVAL,
    exact: Collection[int] = (),
    limit: int | str = LIMIT,
    machine: str | Path | None = None,
) -> Observer:
    """Record where memory and time go, second by second, into a directory.

        with penstock.observe("run/") as obs:
            train()

    Any PyTorch program: forward, backward and update are found by themselves, or named with
    `obs.phase("forward")` and `obs.step()`. Every `interval` seconds memory, disks and cores are
    sampled; for the steps in `exact`, counted from 1, every copy to and from the GPU is recorded.
    The directory takes no more than `limit`. `machine` is a file that `penstock probe` wrote: what
    links could carry. `penstock report run/` shows what was found.
    """
    return Observer(path, interval=interval, exact=exact, limit=limit, machine=machine)
