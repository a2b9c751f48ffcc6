"""Penstock's own runs: what the engine carried out, as phases and events. Room: show."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.engine.allocate import Part
from penstock.engine.step_records import StepRecord
from penstock.engine.timeline import Moved, moved, timeline
from penstock.observe.hardware import disk_name
from penstock.observe.observation import Planned, PlannedTier
from penstock.observe.recorder import Recorder
from penstock.observe.records import Event, Phase
from penstock.observe.samplers import Held
from penstock.plan.schedule import Operation, Verb
from penstock.plan.traffic import DISK, Transfer, step_traffic
from penstock.tiers import Tier

if TYPE_CHECKING:
    from penstock.engine.step_records import Kind


_KINDS = {
    Verb.FETCH: "copy",
    Verb.DRAIN: "copy",
    Verb.READ: "read",
    Verb.WRITE: "write",
    Verb.SWEEP: "sweep",
}


class EngineEvents:
    """Turns programs that were carried out into records. For one thread."""

    def __init__(self, origin: float, disk_name: Callable[[str], str]) -> None:
        self._origin, self._disk_name = origin, disk_name
        self._links: dict[str, str] = {}
        self._moved: dict[object, tuple[StepRecord, Moved]] = {}

    def link(self, link: str) -> str:
        """As the kernel calls a disk; other links are called as they are."""
        if link not in self._links:
            path = link.removeprefix(DISK)
            self._links[link] = link if path == link else DISK + self._disk_name(path)
        return self._links[link]

    # Phases.

    def phases(self, passed: StepRecord, step: int) -> Iterator[Phase]:
        """Forward until the loss begins, backward until the last block is through, round by round.
        Sweeps run beside forward, and are events."""
        began = passed.clock - self._origin
        if not passed.whole or not passed.ended:
            return
        if passed.kind != "step":
            end = began + max(self._seconds(passed, at, ended=True) for at in passed.ended)
            yield Phase(passed.kind, step, began, end)
            return
        reached = began
        for loss, last in self._turns(passed):
            turn = began + self._seconds(passed, loss, ended=False)
            end = began + self._seconds(passed, last, ended=True)
            yield Phase("forward", step, reached, max(reached, turn))
            yield Phase("backward", step, max(reached, turn), max(turn, end))
            reached = max(turn, end)

    def _turns(self, passed: StepRecord) -> Iterator[tuple[int, int]]:
        """By round, its loss and its last backward, where they ran."""
        loss: int | None = None
        last = -1
        for at, operation in enumerate(passed.program.operations):
            if operation.verb is Verb.LOSS and at in passed.ended:
                if loss is not None:
                    yield loss, last
                loss = last = at
            elif operation.verb is Verb.BACKWARD and at in passed.ended:
                last = at
        if loss is not None:
            yield loss, last

    def _seconds(self, passed: StepRecord, at: Part, *, ended: bool) -> float:
        mark = (passed.ended if ended else passed.began)[at]
        return passed.device.seconds(passed.origin, mark)

    # Events.

    def events(self, passed: StepRecord, step: int | None) -> list[Event]:
        """One for what each operation kept busy: a copy from a disk is on the link and the disk.
        What is swept apart is of no step, and in no step's phase."""
        began = passed.clock - self._origin
        names = [block.name for block in passed.inventory.blocks]
        pinned = passed.device.pinned
        apart = None if passed.kind == "step" else passed.kind
        made: list[Event] = []
        for ran in timeline(passed, self._moved_by(passed)):
            op, start, end = ran.operation, began + ran.start, began + ran.end
            name = f"{names[op.block]} {' '.join(op.roles)}".strip()
            phase = apart or op.phase
            if op.verb in _KINDS and ran.transfers and op.verb is not Verb.SWEEP:
                for moves in ran.transfers:
                    kind = _kind(op, moves)
                    link = self.link(moves.link)
                    copied = moves.link in ("h2d", "d2h")
                    made.append(
                        Event(link, kind, name, start, end, step, phase, link, moves.nbytes,
                              moves.source, moves.target, pinned if copied else None,
                              f"{op.verb} {names[op.block]}")
                    )  # fmt: skip
            elif op.verb is Verb.SWEEP and not op.gpu:
                total = sum(moves.nbytes for moves in ran.transfers)
                made.append(Event("cpu sweep", "sweep", names[op.block], start, end, step, phase,
                                  None, total, "host", "host", None, "sweep"))  # fmt: skip
                made += [
                    Event(moves.link, "sweep", names[op.block], start, end, step, phase,
                          moves.link, moves.nbytes, "host", "host", None, "sweep")
                    for moves in ran.transfers
                ]  # fmt: skip
            elif op.verb not in _KINDS or op.gpu:
                kind = "sweep" if op.gpu else "compute"
                named = f"{op.verb} {names[op.block]}"
                made.append(Event("gpu", kind, named, start, end, step, phase))
        return made

    def _moved_by(self, passed: StepRecord) -> Moved:
        """Worked out once for a program and a shape of batch."""
        key = (id(passed.program), str(passed.shapes))
        if key not in self._moved:
            if len(self._moved) > 64:  # batches of ever new shapes
                self._moved.clear()
            self._moved[key] = (passed, moved(passed))  # which keeps the program, and so its id
        return self._moved[key][1]


def _kind(operation: Operation, moves: Transfer) -> str:
    if moves.link in ("h2d", "d2h"):
        return "copy"
    if moves.link.startswith(DISK):
        return "read" if moves.source == "disk" else "write"
    return "write" if operation.verb in (Verb.DRAIN, Verb.READ) else "read"


# The plan.


def planned_of(passed: StepRecord, link: Callable[[str], str]) -> Planned:
    """What the plan said before the first step; of seconds, what it says of this machine."""
    from penstock.plan.build_schedule import step_schedule
    from penstock.planner.cost.peaks import phase_peaks

    plan, inventory = passed.plan, passed.inventory
    work, placement = plan.workload, plan.placement
    schedule = step_schedule(inventory, placement)
    peaks = phase_peaks(inventory, work, placement, schedule, plan.pools)
    traffic = step_traffic(inventory, work, placement, schedule)
    seconds, bound = _cost(passed)
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
        step_seconds=seconds,
        bound_by=bound,
    )


def _cost(passed: StepRecord) -> tuple[float | None, str | None]:
    """What the plan said of this machine, by the same speeds."""
    from penstock.engine.prepare import known_machine
    from penstock.errors import PenstockError
    from penstock.plan.budget import with_paths
    from penstock.planner.cost import estimate
    from penstock.planner.cost.rates import Rates

    plan = passed.plan
    try:
        machine, _ = with_paths(known_machine(passed.device.where.type)[0], plan.budget)
        compiled = plan.workload.numerics.compiled
        rates = Rates.of(machine, plan.workload.moments, compiled=compiled)
        cost = estimate(passed.inventory, plan.workload, plan.placement, rates)
    except PenstockError:
        return None, None
    return cost.step_seconds, cost.bound_by


# --------
# Listens to engines of Penstock's own, as soon as there are any. Room: show.

WATCHING = "penstock.engine.step_records"
HOLDING = "penstock.engine.memory_usage"


class EngineWatcher:
    """Told by the thread that trains; turned into records in the recorder's."""

    def __init__(self, recorder: Recorder, held: Held) -> None:
        self._recorder, self._held = recorder, held
        self._module: Any = None
        self._events: EngineEvents | None = None
        self._planned: object = None

    def look(self) -> None:
        """Begin to listen, once the program has imported an engine."""
        module: Any = sys.modules.get(WATCHING)
        if self._module is None and hasattr(module, "passed_of"):  # its last name: all is there
            self._module = module
            self._held.ask = sys.modules[HOLDING].memory_usages
            module.watch(self)

    def close(self) -> None:
        if self._module is not None:
            self._module.unwatch(self)

    # Watcher.

    def began(self, kind: Kind, *, fresh: bool) -> None:
        try:
            self._recorder.tracker.take_over(begins_step=kind == "step" and fresh)
            self._recorder.engine_step = self._recorder.tracker.step
        except Exception as failed:  # what goes wrong here is no business of the engine's
            self._recorder.note(f"a step was not told apart: {failed}")

    def passed(self, passed: StepRecord) -> None:
        seconds = time.perf_counter() - passed.clock
        step = self._recorder.tracker.step
        self._recorder.tracker.give_back(ends_step=passed.kind == "step" and passed.whole)
        self._recorder.put(lambda: self._record(passed, step, seconds))

    def _record(self, passed: StepRecord, step: int, seconds: float) -> None:

        recorder = self._recorder
        if self._events is None:
            self._events = EngineEvents(recorder.origin, disk_name)
        events = self._events
        if passed.plan is not self._planned:
            self._planned = passed.plan
            self._tell_plan(passed, events)
        for phase in events.phases(passed, step):
            recorder.folder.write(phase)
        now = time.perf_counter() - recorder.origin
        if passed.kind == "step":
            recorder.keeper.add(step, seconds, lambda: events.events(passed, step), now)
        elif passed.kind == "update":
            recorder.keeper.follow(lambda: events.events(passed, None))

    def _tell_plan(self, passed: StepRecord, events: EngineEvents) -> None:

        self._recorder.update(planned=planned_of(passed, events.link))
