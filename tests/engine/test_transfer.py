"""CPU sweeps are queued without waiting for each other, and the timeline shows when they ran."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import compute, step_records, transfer
from penstock.engine.pending_update import make_segments
from penstock.engine.runner import _short_switch_interval
from penstock.engine.step_records import Event
from penstock.model.mlp_tiles import _TiledForward
from penstock.optim.sweep import PreparedSweep, SweepTicket
from penstock.plan.schedule import Operation, Verb
from penstock.roles import Role
from tests.equivalence.runs import DISK, DRAM, RESIDENT, WAYS, Setup, Way


class HeldTicket:
    """A sweep that does not appear to finish before all sweeps have been started."""

    def __init__(self, ticket: SweepTicket, all_started: threading.Event) -> None:
        self._ticket, self._all_started = ticket, all_started

    def done(self) -> bool:
        return self._all_started.is_set() and self._ticket.done()

    def wait(self) -> None:
        assert self._all_started.wait(20), "the next sweep waits for the previous one"
        self._ticket.wait()

    def settle(self) -> None:
        assert self._all_started.wait(20), "the next sweep waits for the previous one"
        self._ticket.settle()


def test_the_next_sweep_starts_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        count = sum(op.verb is Verb.SWEEP for op in engine._programs["sweep"].operations)
        all_started, started = threading.Event(), []

        def start(*args: Any, **kwargs: Any) -> Any:
            started.append(HeldTicket(real(*args, **kwargs), all_started))
            if len(started) == count:
                all_started.set()
            return started[-1]

        real = PreparedSweep.start
        monkeypatch.setattr(PreparedSweep, "start", start)
        engine.finish()

        assert len(started) == count > 2


@pytest.mark.parametrize(
    ("way", "again"),
    [(DRAM, 0), (RESIDENT, 0), (DISK, 5)],
    ids=["in DRAM", "in HBM", "on disk"],
)
def test_sweeps_of_what_stays_in_place_are_prepared_once(
    way: Way, again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def note(inventory: Any, block: int, *args: Any) -> Any:
        made.append(block)
        return make_segments(inventory, block, *args)

    for module in (transfer, compute):
        monkeypatch.setattr(module, "make_segments", note)
    setup = Setup.of("llama", freeze=())
    with setup.engine(way, tmp_path) as engine:
        first, second, third, fourth = setup.batches(4)
        engine.step(first)
        engine.step(second)
        assert made == [0, 1, 2, 3, 4]
        made.clear()
        engine.step(third)
        engine.step(fourth)

        assert len(made) == 2 * again


def test_a_step_sets_the_mode_of_modules_that_somebody_has_changed(tmp_path: Path) -> None:
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        first, second = setup.batches(2)
        engine.step(first)
        layer = engine.split_model.layers[1]
        layer.mlp.eval()
        engine.step(second)

        assert all(module.training for module in layer.modules())


def test_copies_of_modules_follow_a_mode_that_somebody_has_set(tmp_path: Path) -> None:
    """MLPs in tiles call copies, which a model's own `eval` does not reach."""
    with Setup.of("llama", mlp_tile=5).engine(WAYS[1], tmp_path) as engine:
        split = engine.split_model
        tiles = [
            forward for layer in split.layers for module in layer.modules()
            if isinstance(forward := vars(module).get("forward"), _TiledForward)
        ]  # fmt: skip
        assert tiles
        split.train(True)
        for part in (split.model, *split.layers):
            part.eval()
        split.train(False)

        assert not any(tile.first.training or tile.again.training for tile in tiles)


def test_steps_in_two_threads_leave_the_switch_interval_as_it_was() -> None:
    before = sys.getswitchinterval()
    first, second = object(), object()
    _short_switch_interval.start(first)
    _short_switch_interval.start(second)
    _short_switch_interval.stop(first)
    assert sys.getswitchinterval() < before
    _short_switch_interval.stop(second)
    _short_switch_interval.stop(second)  # as after Ctrl-C

    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("way", [WAYS[1], WAYS[3]], ids=lambda way: way.name)
def test_sweeps_in_the_timeline_do_not_overlap_and_precede_their_users(
    way: Way, tmp_path: Path
) -> None:
    setup = Setup.of("llama")
    with setup.engine(way, tmp_path) as engine:
        for batch in setup.batches(2):
            engine.step(batch)
        events = engine.timeline()

    swept = [e for e in events if e.operation.verb is Verb.SWEEP and not e.operation.gpu]
    assert len(swept) > 2
    for before, after in itertools.pairwise(swept):
        assert 0 <= before.start <= before.end
        assert (
            before.end <= after.start or after.start == after.end
        )  # it ended before the previous one
    forward = {e.operation.block: e.start for e in events if e.operation.verb is Verb.FORWARD}
    for event in swept:
        assert event.end <= forward.get(event.operation.block, event.end)


def test_an_overlapping_sweep_starts_where_the_previous_one_ends() -> None:
    spans = [(0.0, 5.0), (4.0, 9.0), (6.0, 8.0), (8.5, 12.0)]
    events = [
        Event(Operation(Verb.SWEEP, at, (), "forward"), *span) for at, span in enumerate(spans)
    ]
    copy = Event(Operation(Verb.FETCH, 0, (Role.WEIGHT,), "forward"), 1.0, 7.0)

    shown = list(step_records._without_sweep_overlap([*events, copy]))

    spans_by_block = {
        e.operation.block: (e.start, e.end) for e in shown if e.operation.verb is Verb.SWEEP
    }
    assert spans_by_block == {0: (0.0, 5.0), 1: (5.0, 9.0), 2: (8.0, 8.0), 3: (9.0, 12.0)}
    assert copy in shown


def test_waiting_names_a_sweep_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog prints this text; a disk that does not respond is named in the same way."""
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        first, second = setup.batches(2)
        engine.step(first)
        go_on, real = threading.Event(), PreparedSweep.start
        monkeypatch.setattr(
            PreparedSweep, "start", lambda *a, **k: HeldTicket(real(*a, **k), go_on)
        )
        step = threading.Thread(target=engine.step, args=(second,))
        step.start()
        try:
            while "sweep of model.embed_tokens" not in engine.waiting():
                assert step.is_alive()
        finally:
            go_on.set()
            step.join()
        assert engine.waiting() == ""


def test_ending_the_sweeps_waits_for_each_of_them_in_order() -> None:
    settled: list[int] = []

    class Ticket:
        def __init__(self, number: int) -> None:
            self.number = number

        def settle(self) -> None:
            settled.append(self.number)

    mover = object.__new__(transfer.Mover)
    mover._sweep_lock = threading.Lock()
    mover._sweeps = deque(Ticket(number) for number in range(3))  # type: ignore[misc]

    mover.end_sweeps()

    assert settled == [0, 1, 2]
    assert not mover._sweeps
