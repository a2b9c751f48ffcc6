"""Tells whoever watches what the engine has carried out. Room: move.

Nothing is measured for it: the marks are those that operations wait for anyway. With nobody
watching it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.engine.allocate import EngineMemory, Part, StepState
from penstock.engine.device import Device, Mark
from penstock.engine.disk_pipe import Tickets
from penstock.engine.program import Program
from penstock.engine.transfer import HostSweep
from penstock.model.inventory import Inventory
from penstock.plan.plan import Plan
from penstock.plan.schedule import Verb

Kind = Literal["step", "evaluate", "update"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A program that was carried out: marks of when, and nothing that keeps tensors alive."""

    plan: Plan
    inventory: Inventory
    device: Device
    program: Program
    batch: int
    """How many batches came before it."""

    origin: Mark
    began: Mapping[Part, Mark]
    ended: Mapping[Part, Mark]
    """By operation, or by micro-batch of it where they move one by one."""

    shapes: Sequence[Sequence[tuple[int, int]]]
    """By round, sequences and tokens of each micro-batch."""

    whole: bool
    """Whether it came to its end."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.program)

    @property
    def clock(self) -> float:
        """When it began, by `time.perf_counter`."""
        return self.device.clock(self.origin)


class Watcher(Protocol):
    """Called by the thread that trains, so it must be quick and must not raise."""

    def began(self, kind: Kind, *, fresh: bool) -> None:
        """A program is about to run; `fresh` if gradients start from zero."""

    def passed(self, passed: StepRecord) -> None:
        """It has run, or failed."""


_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    """From now on, every engine of this process."""
    _watchers.append(watcher)


def unwatch(watcher: Watcher) -> None:
    _watchers.remove(watcher)


def tell_began(run: StepState) -> None:
    for watcher in tuple(_watchers):
        watcher.began(kind_of(run.program), fresh=run.fresh)


def tell_passed(taken: EngineMemory, run: StepState) -> None:
    if _watchers and run.origin is not None:
        passed = passed_of(taken, run)
        for watcher in tuple(_watchers):
            watcher.passed(passed)


def kind_of(program: Program) -> Kind:
    verbs = {op.verb for op in program.operations}
    if Verb.LOSS not in verbs:
        return "update"
    return "step" if Verb.BACKWARD in verbs else "evaluate"


def passed_of(taken: EngineMemory, run: StepState) -> StepRecord:
    assert run.origin is not None
    began, ended = dict(run.began), dict[Part, Mark]()
    for at in run.began:
        mark = run.marks.peek(at)
        if isinstance(mark, HostSweep):
            began[at], mark = mark.span()
        mark = mark.ended if isinstance(mark, Tickets) else mark
        if mark is not None:
            ended[at] = mark
    homes = taken.homes
    return StepRecord(
        plan=homes.plan,
        inventory=homes.inventory,
        device=taken.device,
        program=run.program,
        batch=run.step,
        origin=run.origin,
        began=began,
        ended=ended,
        shapes=[run.shapes(round) for round in range(len(run.rounds))],
        whole=run.marks.failed is None,
    )
