"""training_state.json comes back as it was written, and is refused by field if it is invalid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock import __version__
from penstock.checkpoint.errors import CheckpointError, StateError
from penstock.checkpoint.training_state import (
    OLD_ENGINE_STATE,
    STATE,
    Software,
    TrainingState,
    read_engine_state,
)

FULL = TrainingState(
    engine={"steps": 7, "seed": 0, "loss_scale": 65536.0, "groups": [{"lr": 1e-5}]},
    software=Software(penstock="0.1.0", torch="2.6", transformers="5.0", cuda="12.4", gpu="H200"),
    schedule={"kind": "cosine", "last_epoch": 7, "lrs": [1e-5, 1.5e-7]},
    data={"epoch": 1, "row": 2**60, "files": ["a.jsonl"], "deep": {"x": [None, True, "é"]}},
    numerics={"micro_batch": 4},
)

OLD_STATE = """{
  "version": 1,
  "step": 7,
  "software": {"penstock": "0.1.0", "torch": "2.6", "transformers": "5.0", "gpu": "H200"},
  "schedule": {"schedule": "cosine", "warmup": 1, "steps": 20},
  "data": {"epoch": 1, "row": 12},
  "rng": {"seed": 3},
  "numerics": {"threads": 1},
  "loss_scale": [65536.0, 12]
}
"""
"""A training_state.json of version 1, which repeats a part of engine.json."""

OLD_ENGINE = """{
  "version": 1, "fingerprint": "5f2c", "steps": 7, "batches": 8, "seed": 3, "dtype": "fp16",
  "moments": "fp32", "loss_scale": 65536.0, "good_steps": 12,
  "groups": [{"params": ["a.weight"], "lr": 1e-05, "betas": [0.9, 0.95]}]
}
"""


def test_a_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    FULL.save(tmp_path)

    assert TrainingState.load(tmp_path) == FULL
    assert read_engine_state(tmp_path) == (FULL.engine, tmp_path / STATE)


def test_empty_fields_are_left_out_and_come_back(tmp_path: Path) -> None:
    state = TrainingState(engine={"steps": 0})
    state.save(tmp_path)

    assert TrainingState.load(tmp_path) == state
    assert set(json.loads((tmp_path / STATE).read_text())) == {"version", "engine", "software"}


def test_a_checkpoint_of_version_1_is_read(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(OLD_STATE)
    (tmp_path / OLD_ENGINE_STATE).write_text(OLD_ENGINE)

    state = TrainingState.load(tmp_path)

    assert state.engine == json.loads(OLD_ENGINE)
    assert state.software.torch == "2.6"
    assert state.schedule == {"schedule": "cosine", "warmup": 1, "steps": 20}
    assert state.data == {"epoch": 1, "row": 12}
    assert state.numerics == {"threads": 1}
    assert read_engine_state(tmp_path)[0] == json.loads(OLD_ENGINE)


def test_an_engine_file_alone_is_read(tmp_path: Path) -> None:
    """Earlier versions of `Engine.write` wrote no training_state.json."""
    (tmp_path / OLD_ENGINE_STATE).write_text(OLD_ENGINE)

    assert read_engine_state(tmp_path) == (json.loads(OLD_ENGINE), tmp_path / OLD_ENGINE_STATE)


def test_a_checkpoint_without_engine_state_cannot_be_continued(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(OLD_STATE)

    assert TrainingState.load(tmp_path).engine == {}
    with pytest.raises(StateError, match="engine: is missing"):
        read_engine_state(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "lists instead of tuples"),
        ({1: 2}, "text keys only"),
        ({"a": [(1,)]}, "lists instead of tuples"),
        (float("nan"), "must be plain JSON"),
        ({"a": float("inf")}, "must be plain JSON"),
        (torch.zeros(1), "must be plain JSON"),
    ],
)
def test_a_value_that_would_come_back_changed_is_refused(value: object, message: str) -> None:
    for field in ("engine", "schedule", "data", "numerics"):
        with pytest.raises(StateError, match=f"^{field}: .*{message}"):
            TrainingState(software=Software(), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version: is 3, but this Penstock reads versions up to 2; upgrade"),
        ({"version": 0}, "version: must be 2, got 0"),
        ({"enginee": 1}, "enginee: is not a field here"),
        ({"software": {"torhc": "2"}}, r"software\.torhc: is not a field here; did you mean torch"),
    ],
)
def test_an_invalid_file_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    FULL.save(tmp_path)
    path = tmp_path / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StateError, match=f"{STATE}: {message}") as caught:
        TrainingState.load(tmp_path)

    assert isinstance(caught.value, CheckpointError)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    for read in (TrainingState.load, read_engine_state):
        with pytest.raises(StateError, match=f"{STATE}: cannot be read: No such file"):
            read(tmp_path)


def test_differences_in_software_are_listed() -> None:
    now = Software.here()
    assert now.penstock == __version__
    assert now.torch == torch.__version__
    assert now.differences(now) == ()

    was = Software(torch="2.6", transformers=now.transformers, penstock=__version__, gpu="H200")
    here = Software(torch="2.7", transformers=now.transformers, penstock=__version__)
    assert was.differences(here) == ("torch was 2.6 and is 2.7", "gpu was H200 and is none")
