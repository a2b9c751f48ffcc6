"""What the training loop tells the user about memory, and when it evaluates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.checkpoint.run_directory import list_checkpoints
from penstock.engine.transport import SingleRank
from penstock.settings import Settings
from penstock.train import checkpoints
from penstock.train import loop as loop_module
from penstock.train.loop import TrainingLoop
from penstock.train.rank_commands import RankLeader
from penstock.train.signals import StopRequest
from penstock.units import GiB
from tests.checkpoint.saves import save


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


SIZES = {"_sizes": (100, 300, 50), "nbytes": 450, "out": Path("out")}


@pytest.mark.parametrize(("best", "existing", "needed"), [(False, 0, 1000), (True, 150, 1050)])
def test_a_run_needs_space_for_the_checkpoints_it_keeps_and_the_one_it_writes(
    best: bool, existing: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the weights, twice the states, and two more copies of the best weights."""
    wanted: list[int] = []
    whole = [SimpleNamespace(nbytes=existing)]
    monkeypatch.setattr(checkpoints, "list_checkpoints", lambda _: SimpleNamespace(whole=whole))
    monkeypatch.setattr(checkpoints, "check_room", lambda _, nbytes: wanted.append(nbytes))
    monkeypatch.setattr(checkpoints, "free_nbytes", lambda _: 1 << 20)
    settings = Settings.of({"keep": 2, "save_best": best, "eval_split": 0.1})
    saver: Any = SimpleNamespace(settings=settings, **SIZES)

    checkpoints.CheckpointSaver.check_space(saver)

    assert wanted == [needed]


@pytest.mark.parametrize(
    ("free", "kept", "noted"),
    [(1350, 2, False), (1349, 2, True), (1349, 1, False), (1800, 3, False), (1799, 3, True)],
)
def test_a_run_says_that_only_one_checkpoint_can_be_resumed_during_a_save(
    free: int, kept: int, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third set of states needs 350 more, and a fourth as much again."""
    monkeypatch.setattr(checkpoints, "list_checkpoints", lambda _: SimpleNamespace(whole=[]))
    monkeypatch.setattr("penstock.checkpoint.disk.free_nbytes", lambda _: free)
    monkeypatch.setattr(checkpoints, "free_nbytes", lambda _: free)
    notes: list[str] = []
    settings = Settings.of({"keep": max(2, kept), "keep_resumable": kept})
    saver: Any = SimpleNamespace(settings=settings, _note=notes.append, **SIZES)

    checkpoints.CheckpointSaver.check_space(saver)

    assert bool(notes) == noted
    assert all("only one checkpoint to resume from" in text for text in notes)


@pytest.mark.parametrize(("free", "resumable"), [(450, [3, 2]), (449, [3])])
def test_older_states_are_removed_if_the_next_checkpoint_does_not_fit(
    free: int, resumable: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3, keep_resumable=2)
    monkeypatch.setattr(checkpoints, "free_nbytes", lambda _: free)
    saver: Any = SimpleNamespace(settings=Settings.of({"keep": 3}), **SIZES | {"out": tmp_path})

    checkpoints.CheckpointSaver._make_room(saver)

    found = list_checkpoints(tmp_path).whole
    assert [checkpoint.step for checkpoint in found] == [3, 2, 1]
    assert [checkpoint.step for checkpoint in found if checkpoint.resumable] == resumable


def test_an_evaluation_is_reported_once_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    clock = iter([100.0, 107.5])
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: next(clock))
    asked: list[Any] = []
    held_out = SimpleNamespace(batches=lambda size, shuffle: asked.append((size, shuffle)) or [])
    loop: Any = SimpleNamespace(
        _run=SimpleNamespace(
            data=SimpleNamespace(held_out=held_out), settings=Settings.of({"batch": 3})
        ),
        _batches=SimpleNamespace(step=4),
        _engine=SimpleNamespace(
            evaluate=lambda batches: SimpleNamespace(loss=2.5, tokens=30),
            workload=SimpleNamespace(numerics=SimpleNamespace(label_smoothing=0.0)),
        ),
        _listeners=SimpleNamespace(emit=lambda kind, **fields: events.append({kind: fields})),
        _leader=RankLeader(SingleRank(), StopRequest()),
        _until_stopped=lambda batches: batches,
        _evaluated_step=None,
        _best=None,
    )
    TrainingLoop._evaluate(loop)
    TrainingLoop._evaluate(loop)

    assert events == [{"eval": {"step": 4, "loss": 2.5, "tokens": 30, "seconds": 7.5}}]
    assert asked == [(3, False)]
    assert (loop._evaluated_step, loop._eval_loss, loop._is_evaluating) == (4, 2.5, False)


@pytest.mark.parametrize(("step", "saved", "expected"), [(1, None, []), (2, None, [1]), (2, 1, [])])
def test_a_checkpoint_before_a_bad_batch_is_saved_unless_there_is_one(
    step: int, saved: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    positions: list[Any] = []
    monkeypatch.setattr(loop_module, "save_bad_batch", lambda *_: Path("out/bad.pt"))
    monkeypatch.setattr(loop_module, "to_json", lambda rate: {"rate": rate})
    loop: Any = SimpleNamespace(
        _batches=SimpleNamespace(step=step),
        _run=SimpleNamespace(data=SimpleNamespace(dataset=SimpleNamespace(decode=None))),
        _listeners=SimpleNamespace(note=notes.append),
        _saver=SimpleNamespace(
            out=Path("out"), find_directory=lambda: None, is_saved=lambda number: number == saved
        ),
        _rate="rate",
        _save=positions.append,
    )
    TrainingLoop._save_before_bad_batch(loop, {}, {"row": 7})

    assert [(p.step, p.data, p.schedule) for p in positions] == [
        (s, {"row": 7}, {"rate": "rate"}) for s in expected
    ]
    assert notes == [f"the batch of step {step} was saved to out/bad.pt and, as text, bad.txt"]


@pytest.mark.parametrize(("step", "saved"), [(0, 0), (1, 1), (7, 1)])
def test_a_run_that_is_stopped_after_its_first_step_is_saved(step: int, saved: int) -> None:
    events: list[dict[str, Any]] = []
    saves: list[int] = []
    loop: Any = SimpleNamespace(
        _batches=SimpleNamespace(step=step, steps=9),
        _listeners=SimpleNamespace(emit=lambda kind, **fields: events.append({kind: fields})),
        _save_last=lambda: saves.append(step),
        _out_text="out",
    )
    TrainingLoop._stop_early(loop)

    assert len(saves) == saved
    assert events == [{"stopped": {"step": step, "steps": 9, "out": "out"}}]


class OneBatch:
    """A source of one batch, as the loop sees it."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self._batch, self.position, self.step, self.epoch = batch, {"row": 0}, 0, 0.5

    def __next__(self) -> dict[str, torch.Tensor]:
        self.step += 1
        return self._batch


@pytest.mark.parametrize(
    ("rate", "norm", "updated"), [(0.0, 2.0, False), (0.1, 0.0, False), (0.1, 2.0, True)]
)
def test_a_step_updates_weights_if_neither_its_rate_nor_its_gradient_is_zero(
    rate: float, norm: float, updated: bool
) -> None:
    """The other ranks get the batch and the rates that rank 0 takes the step with."""
    batch, sent, events = {"input_ids": torch.zeros(2, 3)}, [], []
    loop: Any = SimpleNamespace(
        _batches=OneBatch(batch),
        _scheduler=SimpleNamespace(get_last_lr=lambda: [rate], step=lambda: None),
        _leader=SimpleNamespace(step=lambda batch, rates: sent.append((batch, rates))),
        _engine=SimpleNamespace(
            optimizer=SimpleNamespace(param_groups=[{"lr": rate}, {"lr": rate / 2}]),
            step=lambda batch: 1.5,
            skipped=False,
            grad_norm=norm,
            tiers=dict,
            host_memory=dict,
            expert_load=lambda: None,
            start_up=SimpleNamespace(complete=True),
        ),
        _listeners=SimpleNamespace(emit=lambda kind, **fields: events.append((kind, fields))),
        _has_updated=False,
        _note_excess=lambda memories: None,
    )
    TrainingLoop._take_step(loop)

    assert loop._has_updated == updated
    assert sent == [(batch, [rate, rate / 2])]
    ((kind, fields),) = events
    assert (kind, fields["step"], fields["lr"], fields["grad_norm"]) == ("step", 1, rate, norm)
