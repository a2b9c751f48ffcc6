"""Record Penstock's own runs: turn what an engine executed into phases and events.

An engine reports each program it has executed as a `StepRecord`. The thread that trains only
queues it; the recorder's thread converts it.

The engine is imported only inside functions that run after an engine has run: observing another
program must not load it, and the process of `penstock profile` must not load torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.observe.hardware import disk_name
from penstock.observe.peers import PEERS
from penstock.observe.recorder import Recorder
from penstock.observe.records import STATES, Event, Phase, Planned, PlannedTier
from penstock.observe.samplers import TierMemorySampler
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import DISK, LinkTransfer, step_traffic
from penstock.tiers import Tier

if TYPE_CHECKING:
    from penstock.engine.step_records import Event as TimelineEvent
    from penstock.engine.step_records import Kind, Moved, StepRecord
    from penstock.engine.step_state import Part

STEP_RECORDS = "penstock.engine.step_records"
MEMORY_USAGE = "penstock.engine.memory_usage"

MAX_CACHED = 64
"""Number of programs and batch shapes whose transfers are cached."""

_TRANSFER_VERBS = (Verb.FETCH, Verb.OFFLOAD, Verb.READ, Verb.WRITE)
_PEER_VERBS = (Verb.GATHER, Verb.EXCHANGE, Verb.MEET)


class EngineWatcher:
    """Listens to all engines of this process, as soon as there are any.

    `step_started` and `step_finished` are called by the thread that trains; everything else runs in
    the recorder's thread.
    """

    def __init__(self, recorder: Recorder, tiers: TierMemorySampler) -> None:
        self._recorder, self._tiers = recorder, tiers
        self._module: Any = None
        self._events: EngineEvents | None = None
        self._plan: object = None

    def attach(self) -> None:
        """Start listening once the program has imported an engine."""
        module: Any = sys.modules.get(STEP_RECORDS)
        # Another thread may be importing the module. Once this name exists, the observer list and
        # everything that the module imports, such as the memory usage, exist as well.
        if self._module is None and hasattr(module, "add_observer"):
            self._module = module
            self._tiers.memory_usages = sys.modules[MEMORY_USAGE].memory_usages
            module.add_observer(self)

    def close(self) -> None:
        if self._module is not None:
            self._module.remove_observer(self)

    # The engine's StepObserver protocol.

    def step_started(self, kind: Kind, *, fresh: bool) -> None:
        try:
            self._recorder.tracker.enter_engine(begins_step=kind == "step" and fresh)
            self._recorder.engine_step = self._recorder.tracker.step
        except Exception as failed:  # an observer must never make the engine fail
            self._recorder.note(f"the beginning of a step was not recorded: {failed}")

    def step_finished(self, record: StepRecord) -> None:
        seconds = time.perf_counter() - record.host_time
        step = self._recorder.tracker.step
        self._recorder.tracker.leave_engine(ends_step=record.kind == "step" and record.succeeded)
        self._recorder.put(lambda: self._record(record, step, seconds))

    def _record(self, record: StepRecord, step: int, seconds: float) -> None:
        recorder = self._recorder
        if self._events is None:
            self._events = EngineEvents(recorder.origin, disk_name)
        events = self._events
        if record.plan is not self._plan:
            self._plan = record.plan
            recorder.update(planned=planned_of(record, events.link))
        for phase in events.phases(record, step):
            recorder.folder.write(phase)
        now = time.perf_counter() - recorder.origin
        if record.kind == "step":
            recorder.step_selector.add(step, seconds, lambda: events.events(record, step), now)
        elif record.kind == "update":
            recorder.step_selector.follow(lambda: events.events(record, None))


class EngineEvents:
    """Converts executed programs to phases and events. Used by one thread at a time."""

    def __init__(self, origin: float, disk_name: Callable[[str], str]) -> None:
        self._origin, self._disk_name = origin, disk_name
        self._links: dict[str, str] = {}
        self._moved: dict[object, tuple[StepRecord, Moved]] = {}

    def link(self, link: str) -> str:
        """Return a link's name in records: disks have the kernel's name instead of a path."""
        if link not in self._links:
            path = link.removeprefix(DISK)
            self._links[link] = link if path == link else DISK + self._disk_name(path)
        return self._links[link]

    # Phases.

    def phases(self, record: StepRecord, step: int) -> Iterator[Phase]:
        """Yield the phases of a program.

        In each round of a step, forward lasts until the loss begins, and backward until the last
        block is done. Optimizer sweeps run concurrently with forward, so they are events, not
        phases.
        """
        began = record.host_time - self._origin
        if not record.succeeded or not record.ended:
            return
        if record.kind != "step":
            end = began + max(self._seconds(record, at, ended=True) for at in record.ended)
            yield Phase(record.kind, step, began, end)
            return
        reached = began
        for loss, last in self._turns(record):
            turn = began + self._seconds(record, loss, ended=False)
            end = began + self._seconds(record, last, ended=True)
            yield Phase("forward", step, reached, max(reached, turn))
            yield Phase("backward", step, max(reached, turn), max(turn, end))
            reached = max(turn, end)

    def _turns(self, record: StepRecord) -> Iterator[tuple[int, int]]:
        """Yield the loss and the last backward of each round, if they ran."""
        loss: int | None = None
        last = -1
        for at, operation in enumerate(record.program.operations):
            if operation.verb is Verb.LOSS and at in record.ended:
                if loss is not None:
                    yield loss, last
                loss = last = at
            elif operation.verb is Verb.BACKWARD and at in record.ended:
                last = at
        if loss is not None:
            yield loss, last

    def _seconds(self, record: StepRecord, at: Part, *, ended: bool) -> float:
        ticket = (record.ended if ended else record.started)[at]
        return record.device.seconds_between(record.origin, ticket)

    # Events.

    def events(self, record: StepRecord, step: int | None) -> list[Event]:
        """Return one event for each resource that an operation kept busy.

        A copy whose data comes from a disk is on the PCIe link and on the disk. A sweep that ran
        outside a step has no step, and its phase is the program's kind.
        """
        from penstock.engine.step_records import timeline

        found: list[Event] = []
        for ran in timeline(record, self._moved_by(record)):
            verb = ran.operation.verb
            if verb in _TRANSFER_VERBS:
                found += self._transfers(record, ran, step)
            elif verb is Verb.SWEEP and not ran.operation.gpu:
                found += self._cpu_sweep(record, ran, step)
            elif verb in _PEER_VERBS:
                found.append(self._peer_work(record, ran, step))
            else:
                found.append(self._gpu_work(record, ran, step))
        return found

    def _transfers(
        self, record: StepRecord, ran: TimelineEvent, step: int | None
    ) -> Iterator[Event]:
        op, block = ran.operation, _block_name(record, ran)
        name = block + STATES if op.gpu else f"{block} {' '.join(op.roles)}".strip()
        start, end, phase = self._span(record, ran)
        for transfer in ran.transfers:
            link = self.link(transfer.link)
            pinned = record.device.pinned if transfer.link in ("h2d", "d2h") else None
            yield Event(link, _kind(op, transfer), name, start, end, step, phase, link,
                        transfer.nbytes, transfer.source, transfer.target, pinned,
                        f"{op.verb} {block}")  # fmt: skip

    def _cpu_sweep(
        self, record: StepRecord, ran: TimelineEvent, step: int | None
    ) -> Iterator[Event]:
        """Yield one event for the CPU, and one for each memory node that the sweep uses."""
        block = _block_name(record, ran)
        start, end, phase = self._span(record, ran)
        total = sum(transfer.nbytes for transfer in ran.transfers)
        yield Event("cpu sweep", "sweep", block, start, end, step, phase, None, total, "host",
                    "host", None, "sweep")  # fmt: skip
        for transfer in ran.transfers:
            yield Event(transfer.link, "sweep", block, start, end, step, phase, transfer.link,
                        transfer.nbytes, "host", "host", None, "sweep")  # fmt: skip

    def _gpu_work(self, record: StepRecord, ran: TimelineEvent, step: int | None) -> Event:
        kind = "sweep" if ran.operation.gpu else "compute"
        name = f"{ran.operation.verb} {_block_name(record, ran)}"
        start, end, phase = self._span(record, ran)
        return Event("gpu", kind, name, start, end, step, phase)

    def _peer_work(self, record: StepRecord, ran: TimelineEvent, step: int | None) -> Event:
        """Return an event of what ranks do together, which includes waiting for them."""
        name = f"{ran.operation.verb} {_block_name(record, ran)}"
        start, end, phase = self._span(record, ran)
        return Event(PEERS, "peers", name, start, end, step, phase)

    def _span(self, record: StepRecord, ran: TimelineEvent) -> tuple[float, float, str]:
        began = record.host_time - self._origin
        phase = ran.operation.phase if record.kind == "step" else record.kind
        return began + ran.start, began + ran.end, phase

    def _moved_by(self, record: StepRecord) -> Moved:
        """Return a program's transfers, derived once for each program and shape of batch."""
        from penstock.engine.step_records import transfers_of

        key = (id(record.program), str(record.shapes))
        if key not in self._moved:
            if len(self._moved) > MAX_CACHED:  # every batch has a new shape
                self._moved.clear()
            # The cache holds the record, and with it the program: its id cannot be reused.
            self._moved[key] = (record, transfers_of(record))
        return self._moved[key][1]


def _block_name(record: StepRecord, ran: TimelineEvent) -> str:
    return record.inventory.blocks[ran.operation.block].name


def _kind(operation: Operation, transfer: LinkTransfer) -> str:
    if transfer.link in ("h2d", "d2h"):
        return "copy"
    if transfer.link.startswith(DISK):
        return "read" if transfer.source == "disk" else "write"
    return "write" if operation.verb in (Verb.OFFLOAD, Verb.READ) else "read"


# The plan.


def planned_of(record: StepRecord, link: Callable[[str], str]) -> Planned:
    """Return the plan's figures, with the step time that it predicts for this machine."""
    from penstock.plan.build_schedule import step_schedule
    from penstock.planner.cost.peaks import phase_peaks

    plan, inventory = record.plan, record.inventory
    work, placement = plan.workload, plan.placement
    schedule = step_schedule(inventory, placement)
    peaks = phase_peaks(inventory, work, placement, schedule, plan.pools)
    traffic = step_traffic(inventory, work, placement, schedule)
    seconds, bound = _predicted_cost(record)
    return Planned(
        tiers={
            tier.value: PlannedTier(plan.budget.of(tier), plan.at_rest(tier), plan.peak(tier))
            for tier in Tier
        },
        phases={
            {"sweep": "update"}.get(phase, phase): {t.value: most for t, most in tiers.items()}
            for phase, tiers in peaks.items()
        },
        links={link(name): nbytes for name, nbytes in traffic.items()},
        host=plan.host_nbytes,
        step_seconds=seconds,
        bound_by=bound,
    )


def _predicted_cost(record: StepRecord) -> tuple[float | None, str | None]:
    """Return the predicted step time and bottleneck, or None if this machine is not known."""
    from penstock.errors import PenstockError
    from penstock.plan.budget import with_paths
    from penstock.planner.cost import estimate
    from penstock.planner.cost.rates import Rates
    from penstock.probe.machine_choice import this_machine

    plan = record.plan
    try:
        paths = [path.path for path in plan.budget.nvme]
        here = this_machine(record.device.torch_device.type, paths)
        machine, _ = with_paths(here.machine, plan.budget)
        work, compiled = plan.workload, plan.workload.numerics.compiled
        rates = Rates.of(machine, work.moments, dtype=work.dtype, compiled=compiled)
        cost = estimate(record.inventory, plan.workload, plan.placement, rates)
    except PenstockError:
        return None, None
    return cost.step_seconds, cost.bound_by
