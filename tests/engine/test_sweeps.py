"""Sweeps on the CPU follow one another without waiting for Python or for stragglers, and tell when
they ran."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import step_records, transfer
from penstock.engine.step_records import Event
from penstock.optim import sweep
from penstock.plan.schedule import Operation, Verb
from penstock.roles import Role
from tests.equivalence.runs import WAYS, Setup, Way


class HeldTicket:
    """A sweep whose end nobody sees before all have been started."""

    def __init__(self, ticket: sweep.SweepTicket, all_started: threading.Event) -> None:
        self._ticket, self._all_started = ticket, all_started

    def done(self) -> bool:
        return self._all_started.is_set() and self._ticket.done()

    def wait(self) -> None:
        assert self._all_started.wait(20), "the next sweep waits for the previous one"
        self._ticket.wait()

    def settle(self) -> None:
        assert self._all_started.wait(20), "the next sweep waits for the previous one"
        self._ticket.settle()


def test_the_next_sweep_is_started_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        count = sum(op.verb is Verb.SWEEP for op in engine._programs.sweep.operations)
        all_started, started = threading.Event(), []

        def start(*given: Any, **how: Any) -> Any:
            started.append(HeldTicket(real(*given, **how), all_started))
            if len(started) == count:
                all_started.set()
            return started[-1]

        real = sweep.start
        monkeypatch.setattr(transfer.sweep, "start", start)
        engine.finish()

        assert len(started) == count > 2


@pytest.mark.parametrize("way", [WAYS[1], WAYS[3]], ids=lambda way: way.name)
def test_sweeps_are_told_without_overlap_and_before_what_needs_them(
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
        assert before.end <= after.start or after.start == after.end  # or ended before it
    forward = {e.operation.block: e.start for e in events if e.operation.verb is Verb.FORWARD}
    for event in swept:
        assert event.end <= forward.get(event.operation.block, event.end)


def test_sweeps_that_overlap_are_told_from_where_the_one_before_has_ended() -> None:
    spans = [(0.0, 5.0), (4.0, 9.0), (6.0, 8.0), (8.5, 12.0)]
    events = [
        Event(Operation(Verb.SWEEP, at, (), "forward"), *span) for at, span in enumerate(spans)
    ]
    copy = Event(Operation(Verb.FETCH, 0, (Role.WEIGHT,), "forward"), 1.0, 7.0)

    told = list(step_records._without_sweep_overlap([*events, copy]))

    found = {e.operation.block: (e.start, e.end) for e in told if e.operation.verb is Verb.SWEEP}
    assert found == {0: (0.0, 5.0), 1: (5.0, 9.0), 2: (8.0, 8.0), 3: (9.0, 12.0)}
    assert copy in told


def test_who_waits_for_a_sweep_that_does_not_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watchdog tells: of a disk that does not answer, too."""
    setup = Setup.of("llama")
    with setup.engine(WAYS[1], tmp_path) as engine:
        first, second = setup.batches(2)
        engine.step(first)
        go_on, real = threading.Event(), sweep.start
        monkeypatch.setattr(
            transfer.sweep, "start", lambda *a, **k: HeldTicket(real(*a, **k), go_on)
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
