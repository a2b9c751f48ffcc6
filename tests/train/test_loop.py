"""What the training loop tells the user about memory, and when it evaluates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.settings import Settings
from penstock.train import checkpoints
from penstock.train.loop import TrainingLoop
from penstock.units import GiB


def test_memory_above_the_plan_is_reported_once() -> None:
    notes: list[str] = []
    loop: Any = SimpleNamespace(_exceeded=set(), _listeners=SimpleNamespace(note=notes.append))
    within = {"dram": {"planned": GiB, "peak": GiB}}
    above = {"hbm": {"planned": GiB, "peak": 3 * GiB}, "host": {"planned": GiB, "peak": 2 * GiB}}

    for _ in range(2):
        TrainingLoop._note_excess(loop, within | above)

    hbm, host = notes
    assert hbm.startswith("hbm: 3.00 GiB in use, 2.00 GiB more than the planned 1.00 GiB")
    assert host.startswith("host: 2.00 GiB in use, 1.00 GiB more than the planned 1.00 GiB")
    assert "penstock probe" in host


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4]), (3, [3]), (None, [])])
def test_a_run_evaluates_every_so_many_steps_before_its_end(
    every: int | None, expected: list[int]
) -> None:
    """At the end, the loop evaluates anyway."""
    evaluated: list[int] = []
    for step in range(1, 7):
        loop: Any = SimpleNamespace(
            _run=SimpleNamespace(settings=Settings.of({"eval_every": every})),
            _batches=SimpleNamespace(step=step),
            _at_end=step == 6,
            _evaluate_and_sample=lambda step=step: evaluated.append(step),
        )
        TrainingLoop._evaluate_if_due(loop)

    assert evaluated == expected


@pytest.mark.parametrize(("best", "existing", "needed"), [(False, 0, 1000), (True, 150, 1050)])
def test_a_run_needs_space_for_the_checkpoints_it_keeps_and_the_one_it_writes(
    best: bool, existing: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the weights, twice the states, and two more copies of the best weights."""
    wanted: list[int] = []
    whole = [SimpleNamespace(nbytes=existing)]
    monkeypatch.setattr(checkpoints, "list_checkpoints", lambda _: SimpleNamespace(whole=whole))
    monkeypatch.setattr(checkpoints, "check_room", lambda _, nbytes: wanted.append(nbytes))
    settings = Settings.of({"keep": 2, "save_best": best, "eval_split": 0.1})
    saver: Any = SimpleNamespace(_sizes=(100, 300, 50), nbytes=450, _out="out", _settings=settings)

    checkpoints.CheckpointSaver.check_space(saver)

    assert wanted == [needed]
