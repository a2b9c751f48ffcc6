"""Records of executed steps: which operation ran when, and what it moved.

Nothing is measured for this. The times come from the tickets that operations wait for anyway, and a
process without observers pays nothing. `Engine.timeline` and the recorder of `penstock profile`
read these records.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from penstock.engine.allocate import EngineMemory
from penstock.engine.device import Device
from penstock.engine.program import Program
from penstock.engine.step_state import Part, StepState
from penstock.model.inventory import Inventory
from penstock.optim.sweep import SweepTicket
from penstock.plan.plan import Plan
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import LinkTransfer, Traffic
from penstock.roles import Role
from penstock.ticket import Finished, Ticket, TicketGroup

Kind = Literal["step", "evaluate", "update"]

Moved = Mapping[Part, tuple[LinkTransfer, ...]]
"""The transfers of each part of a program."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A program that was carried out, with tickets for times; it keeps no tensor alive."""

    plan: Plan
    inventory: Inventory
    device: Device
    program: Program
    origin: Ticket[None]
    started: Mapping[Part, Ticket[object]]
    ended: Mapping[Part, Ticket[object]]
    """By operation, or by micro-batch of an operation that moves them one after another."""

    shapes: Sequence[Sequence[tuple[int, int]]]
    """By round: sequences and tokens of each micro-batch."""

    succeeded: bool
    """Whether the program ran to its end."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.program)

    @property
    def host_time(self) -> float:
        """When the step began, by `time.perf_counter`."""
        return self.device.host_time(self.origin)


# Observers.


class StepObserver(Protocol):
    """Receives every step of every engine in the process.

    The training thread calls it, so it must be quick and must not raise.
    """

    def step_started(self, kind: Kind, *, fresh: bool) -> None:
        """A program is about to run; `fresh` if gradients start from zero."""

    def step_finished(self, record: StepRecord) -> None:
        """A program has run, or has failed."""


_observers: list[StepObserver] = []


def add_observer(observer: StepObserver) -> None:
    """Notify the observer of all steps from now on."""
    _observers.append(observer)


def remove_observer(observer: StepObserver) -> None:
    _observers.remove(observer)


@contextlib.contextmanager
def observers_paused() -> Iterator[None]:
    """Notify no observer of the steps inside the block, which are no part of the user's run."""
    paused = list(_observers)
    _observers.clear()
    try:
        yield
    finally:
        _observers[:0] = paused


def notify_started(step: StepState) -> None:
    for observer in tuple(_observers):
        observer.step_started(kind_of(step.program), fresh=step.fresh)


def notify_finished(memory: EngineMemory, step: StepState) -> None:
    if _observers and step.origin is not None:
        record = record_step(memory, step)
        for observer in tuple(_observers):
            observer.step_finished(record)


def kind_of(program: Program) -> Kind:
    """Return what a program does: train, evaluate, or only update the weights."""
    verbs = {op.verb for op in program.operations}
    if Verb.LOSS not in verbs:
        return "update"
    return "step" if Verb.BACKWARD in verbs else "evaluate"


def record_step(memory: EngineMemory, step: StepState) -> StepRecord:
    """Return the record of a step whose work has ended."""
    assert step.origin is not None
    started, ended = dict(step.started), dict[Part, Ticket[object]]()
    for part in step.started:
        ticket = step.tickets.peek(part)
        if isinstance(ticket, SweepTicket):
            # The lane only queues sweeps. The native job knows when its threads worked on it.
            started[part] = Finished(None, ticket.began)
            ticket = Finished(None, ticket.ended)
        elif isinstance(ticket, TicketGroup):
            finished_at = ticket.finished_at
            ticket = None if finished_at is None else Finished(None, finished_at)
        if ticket is not None:
            ended[part] = ticket
    tiers = memory.tiers
    return StepRecord(
        plan=tiers.plan,
        inventory=tiers.inventory,
        device=memory.device,
        program=step.program,
        origin=step.origin,
        started=started,
        ended=ended,
        shapes=[step.shapes(round) for round in range(len(step.rounds))],
        succeeded=step.tickets.failed is None,
    )


# The timeline.


@dataclass(frozen=True, slots=True)
class Event:
    """One operation, or one micro-batch of it, with times in seconds from the step's start."""

    operation: Operation
    start: float
    end: float
    transfers: tuple[LinkTransfer, ...] = ()
    """Transfers that it made."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def transfers_of(record: StepRecord) -> Moved:
    """Return the transfers of each part, which depend only on the program and the batch shape."""
    traffic = Traffic.of(record.inventory, record.plan.workload, record.plan.placement)
    operations = record.program.operations
    shapes = record.shapes or [()] * (1 + max(op.round for op in operations))
    moved: dict[Part, tuple[LinkTransfer, ...]] = {}
    for at, op in enumerate(operations):
        moved[at] = traffic.transfers(op, shapes[op.round])
        if op.roles in ((Role.ACTIVATION,), (Role.ATTENTION,)):
            for micro, parts in traffic.micro_transfers(op, shapes[op.round]).items():
                moved[at, micro] = parts
    return moved


def operation_index(part: Part) -> int:
    return part[0] if isinstance(part, tuple) else part


def timeline(record: StepRecord, transfers: Moved | None = None) -> list[Event]:
    """Return everything that ran, sorted by start. The step has ended, so this waits for nothing.

    A sweep on the CPU may begin before the previous one has ended. Its event starts at the end of
    the previous one, so that the sweep lane is never counted twice.
    """
    transfers = transfers_of(record) if transfers is None else transfers
    events = []
    for part, started in record.started.items():
        ended = record.ended.get(part)
        if ended is None:
            continue
        start = record.device.seconds_between(record.origin, started)
        end = record.device.seconds_between(record.origin, ended)
        op = record.program.operations[operation_index(part)]
        events.append(Event(op, start, max(start, end), transfers[part]))
    return sorted(_without_sweep_overlap(events), key=lambda event: (event.start, event.end))


def _without_sweep_overlap(events: Iterable[Event]) -> Iterator[Event]:
    reached = 0.0
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        if event.operation.lane == "sweep":
            start = min(max(event.start, reached), event.end)
            reached = max(reached, event.end)
            yield replace(event, start=start)
        else:
            yield event


def busy(events: Iterable[Event]) -> dict[str, float]:
    """Return, per lane, the seconds in which it had work running."""
    by_lane: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_lane[event.operation.lane].append(event)
    return {lane: _union_seconds(listed) for lane, listed in sorted(by_lane.items())}


def idle(events: Sequence[Event], lane: str) -> list[tuple[float, float, Operation]]:
    """Return the gaps of a lane: start, end, and the operation that ended each gap."""
    own = sorted((e for e in events if e.operation.lane == lane), key=lambda e: e.start)
    gaps, reached = [], 0.0
    for event in own:
        if event.start > reached:
            gaps.append((reached, event.start, event.operation))
        reached = max(reached, event.end)
    return gaps


def _union_seconds(events: list[Event]) -> float:
    total, reached = 0.0, 0.0
    for event in sorted(events, key=lambda e: e.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total
