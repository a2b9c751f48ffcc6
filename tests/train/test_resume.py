"""What a resumed run keeps from its checkpoint, and what the user may set anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.checkpoint.manifest import Checkpoint, Manifest
from penstock.checkpoint.training_state import TrainingState
from penstock.distributed.rank_group import single_rank
from penstock.engine.startup import StartUp
from penstock.engine.transport import SingleRank
from penstock.plan.budget import Budget, PathBudget
from penstock.plan.workload import Numerics
from penstock.records import to_json
from penstock.settings import Settings
from penstock.storage.leftovers import find_stores
from penstock.storage.store import Store
from penstock.train import plan_choice, session
from penstock.train.rank_commands import RankLeader
from penstock.train.resume import ResumePoint, resumed_numerics
from penstock.train.signals import StopRequest

SAVED = Numerics(
    micro_batch=3, loss_chunk=1000, mlp_tile=2000, attention="varlen", loss_kernel="fused",
    head_sum="micro", compiled=True, deterministic=True,
)  # fmt: skip
FRESH = Numerics(micro_batch=1, loss_chunk=64, mlp_tile=64, head_sum="chunk")


def resume_point() -> ResumePoint:
    state = TrainingState(numerics={"workload": to_json(SAVED)})
    return ResumePoint(
        Checkpoint(path=Path("out/step-4"), manifest=Manifest(step=4, files={})), state
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SAVED),
        ({"micro_batch": 2}, replace(SAVED, micro_batch=2)),
        ({"batch": 2}, replace(SAVED, micro_batch=2)),
        ({"deterministic": False}, replace(SAVED, deterministic=False)),
        ({"label_smoothing": 0.1}, replace(SAVED, label_smoothing=0.1)),
        ({"neftune_noise_alpha": 5}, replace(SAVED, neftune_noise_alpha=5.0)),
    ],
    ids=[
        *("nothing set", "micro-batch", "a smaller batch", "not deterministic", "smoothed labels"),
        "noise",
    ],
)
def test_a_resume_keeps_the_numerics_of_the_checkpoint(
    given: dict[str, object], expected: Numerics
) -> None:
    settings = Settings.of({"batch": 8} | given)

    assert resumed_numerics(FRESH, resume_point(), settings) == expected
    assert resumed_numerics(FRESH, None, settings) == FRESH


def test_an_engine_whose_checkpoint_cannot_be_read_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    def read(*_: object, **__: object) -> None:
        raise OSError("cannot be read")

    engine = SimpleNamespace(read=read, close=lambda: closed.append(True))
    monkeypatch.setattr("penstock.engine.prepare.prepare", lambda *_, **__: engine)
    any_of: Any = SimpleNamespace(source="model", show_work=lambda *_: None)
    leader = RankLeader(SingleRank(), StopRequest())
    run = session._Session(any_of, any_of, any_of, single_rank(), leader, StartUp())

    with pytest.raises(OSError, match="cannot be read"):
        session._prepare_engine(Settings(), any_of, any_of, resume_point(), run, [])
    assert closed == [True]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, []),
        ({}, []),
        ({"steps": 10}, []),
        ({"steps": 12}, ["the number of steps was 12 and is 10"]),
    ],
)
def test_another_number_of_steps_is_reported(schedule: Any, expected: list[str]) -> None:
    settings = Settings.of({"batch": 8})
    saved = {name: to_json(value) for name, value in settings.flat().items()}
    state = TrainingState(
        numerics={"workload": to_json(SAVED), "settings": saved}, schedule=schedule
    )
    point = ResumePoint(
        Checkpoint(path=Path("out/step-4"), manifest=Manifest(step=4, files={})), state
    )

    assert point.differences(settings, steps=10) == expected
    clip = point.differences(Settings.of({"batch": 8, "clip": 0.5}), steps=10)
    assert clip == [*expected, f"clip was {saved['clip']} and is 0.5"]


@pytest.mark.parametrize("from_file", [False, True], ids=["budgets", "plan file"])
def test_stores_of_killed_runs_are_removed_before_the_machine_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_file: bool
) -> None:
    """They take the space that the plan needs. A store that is in use stays."""
    store = Store.create(tmp_path, 1, engine="threads")
    store._finalizer.detach()
    store.volumes[0].close()  # as a killed process leaves it
    paths = (PathBudget(path=str(tmp_path), nbytes=1), PathBudget(path="/nowhere", nbytes=1))
    plan = SimpleNamespace(budget=Budget(hbm=1, dram=1, nvme=paths))
    given = {"plan": "plan.json"} if from_file else {"nvme": [f"{tmp_path}:1GiB", "/nowhere:1"]}

    def describe(**_: object) -> None:
        raise RuntimeError([found.state for found in find_stores([tmp_path])])

    monkeypatch.setattr(plan_choice, "Plan", SimpleNamespace(load=lambda _: plan))
    monkeypatch.setattr(plan_choice, "this_machine", describe)
    model: Any = SimpleNamespace(inventory=None, config=None)

    with (
        Store.create(tmp_path, 1, engine="threads"),
        pytest.raises(RuntimeError, match=r"\['in use'\]"),
    ):
        plan_choice.choose_plan(Settings.of(given), model, steps=1, resume=None)
