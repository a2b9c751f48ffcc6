"""Every operation waits for what it needs, and the timeline shows every operation that ran."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.engine.program import INSTANT
from penstock.engine.step_state import StepState
from penstock.engine.ticket_board import TicketBoard
from penstock.plan.schedule import COMPUTE, Verb
from penstock.roles import Role
from tests.equivalence.runs import HYBRID, INTERLEAVED, LATE, WAYS, Setup, Way

MIXED = Way("two rounds of everything", ("nnnn", "dddd", "hhhh", "ddnn", "nddn"),
            {"rounds": 2, "piece": 4096})  # fmt: skip
PLACEMENTS = (MIXED, WAYS[3], WAYS[8], HYBRID[2], LATE[3], LATE[6], LATE[8], INTERLEAVED)


class Waits:
    """What each thread had waited for when it posted a ticket, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._waited: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
        self.before: dict[tuple[int, Hashable], frozenset[Hashable]] = {}
        for name in ("wait", "order_after"):
            self._wrap(monkeypatch, name)
        post = TicketBoard.post

        def posted(board: TicketBoard, key: Hashable, ticket: Any) -> None:
            waited = self._waited[id(board), threading.get_ident()]
            self.before[id(board), key] = frozenset(waited)
            post(board, key, ticket)

        monkeypatch.setattr(TicketBoard, "post", posted)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        plain = getattr(TicketBoard, name)

        def call(board: TicketBoard, key: Hashable, *rest: Any) -> None:
            plain(board, key, *rest)
            self._waited[id(board), threading.get_ident()].append(key)

        monkeypatch.setattr(TicketBoard, name, call)


def run_steps(engine: Engine, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> list[StepState]:
    """Make two steps, an evaluation and a sweep; return all of them."""
    steps = []
    run = engine._runner.run

    def record(step: StepState) -> None:
        steps.append(step)
        run(step)

    monkeypatch.setattr(engine._runner, "run", record)
    batches = setup.batches(3)
    engine.step(batches[0])
    engine.step(batches[1])
    engine.finish()
    engine.evaluate([batches[2]])
    return steps


@pytest.mark.parametrize("way", PLACEMENTS, ids=lambda way: way.name)
def test_every_operation_waits_for_everything_it_needs(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup.of("llama", batch=6, micro_batch=1)
    with setup.engine(way, tmp_path) as engine:
        waits = Waits(monkeypatch)
        steps = run_steps(engine, setup, monkeypatch)
        missing = []
        for step in steps:
            for at, op in enumerate(step.program.operations):
                if op.verb in INSTANT:
                    continue
                assert step.tickets.has(at), op
                waited = waits.before[id(step.tickets), at]
                missing += [
                    (op, step.program.operations[need])
                    for need in step.program.needs[at]
                    if need not in waited and not _micro_batches(step, need, op.round) <= waited
                ]
        assert len(steps) > 3
    assert missing == []


def _micro_batches(step: StepState, at: int, round: int) -> set[Hashable]:
    """Return the keys of all micro-batches of an operation that has such."""
    count = len(step.rounds[round]) if step.rounds else 0
    keys: set[Hashable] = {(at, micro) for micro in range(count)}
    return keys if count and all(step.tickets.has(key) for key in keys) else {None}


@pytest.mark.parametrize("way", PLACEMENTS, ids=lambda way: way.name)
def test_a_slot_of_activations_is_used_again_after_its_users(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more micro-batches than slots, forward waits for offloads, and fetches for backward."""
    setup = Setup.of("llama", batch=6, micro_batch=1)
    with setup.engine(way, tmp_path) as engine:
        waits = Waits(monkeypatch)
        steps = run_steps(engine, setup, monkeypatch)
        checked = 0
        for step in steps:
            for round, users in step.activation_users.items():
                slots = len(step.activation_slots[round])
                fetches = [
                    (at, micro)
                    for at, op in enumerate(step.program.operations)
                    if op.verb is Verb.FETCH and op.roles == (Role.ACTIVATION,)
                    if op.round == round
                    for micro in range(len(step.rounds[round]))
                ]
                assert len(fetches) == len(users)
                for number, key in enumerate(fetches[slots:]):
                    assert users[number] in waits.before[id(step.tickets), key]
                    checked += 1
            for (round, block, micro), slot in step.hidden_slots.items():
                offload = step.program.at.get((Verb.OFFLOAD, block, round, Role.ACTIVATION))
                later = [
                    step.program.at[Verb.FORWARD, other - 1, round, None]
                    for (r, other, _), s in step.hidden_slots.items()
                    if (r, s) == (round, slot) and other > block
                ]
                if offload is not None and later:
                    assert (offload, micro) in waits.before[id(step.tickets), min(later)]
                    checked += 1
        assert checked > 10


@pytest.mark.parametrize("way", PLACEMENTS, ids=lambda way: way.name)
def test_the_timeline_has_every_operation_once_from_its_start_to_its_end(
    way: Way, tmp_path: Path
) -> None:
    setup = Setup.of("llama", batch=6, micro_batch=1)
    with setup.engine(way, tmp_path) as engine:
        assert engine.timeline() == []
        for batch in setup.batches(2):
            engine.step(batch)
        events = engine.timeline()
        program = engine._programs["step"]
        rounds = engine.plan.placement.rounds

    shown: dict[Any, int] = defaultdict(int)
    for event in events:
        assert 0 <= event.start <= event.end, event
        shown[event.operation] += 1
    for op in program.operations:
        wanted = 6 // rounds if op.roles == (Role.ACTIVATION,) else 1
        assert shown.pop(op, 0) == (0 if op.verb in INSTANT else wanted), op
    assert not shown


def test_every_computation_is_reported_as_progress(tmp_path: Path) -> None:
    """The watchdog of a run takes an engine that reports nothing for stuck."""
    setup = Setup.of("llama")
    reported: list[tuple[int, int, str]] = []
    with setup.engine(WAYS[3], tmp_path) as engine:
        engine.on_progress = lambda *given: reported.append(given)
        engine.step(setup.batches(1)[0])
        operations = engine._programs["first"].operations
        names = [block.name for block in engine.inventory.blocks]

    expected = [
        (at, len(operations), f"{op.verb} {names[op.block]}")
        for at, op in enumerate(operations)
        if op.verb in COMPUTE or op.gpu
    ]
    assert reported == expected
