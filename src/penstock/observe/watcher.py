"""Listens to engines of Penstock's own, as soon as there are any. Room: show."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from penstock.observe.hardware import disk_name
from penstock.observe.recorder import Recorder
from penstock.observe.samplers import Held

if TYPE_CHECKING:
    from penstock.observe.engine_events import EngineEvents
    from penstock.stream.watching import Kind, Passed

WATCHING = "penstock.stream.watching"
HOLDING = "penstock.stream.holding"


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
            self._held.ask = sys.modules[HOLDING].holdings
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

    def passed(self, passed: Passed) -> None:
        seconds = time.perf_counter() - passed.clock
        step = self._recorder.tracker.step
        self._recorder.tracker.give_back(ends_step=passed.kind == "step" and passed.whole)
        self._recorder.put(lambda: self._record(passed, step, seconds))

    def _record(self, passed: Passed, step: int, seconds: float) -> None:
        from penstock.observe.engine_events import EngineEvents

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

    def _tell_plan(self, passed: Passed, events: EngineEvents) -> None:
        from penstock.observe.engine_events import planned_of

        self._recorder.update(planned=planned_of(passed, events.link))
