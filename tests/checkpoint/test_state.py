"""What lies beside the tensors comes back as it went, or is refused by field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock import __version__
from penstock.checkpoint.errors import CheckpointError, StateError
from penstock.checkpoint.training_state import STATE, Software, TrainingState

FULL = TrainingState(
    step=7,
    software=Software(penstock="0.1.0", torch="2.6", transformers="5.0", cuda="12.4", gpu="H200"),
    schedule={"kind": "cosine", "last_epoch": 7, "lrs": [1e-5, 1.5e-7]},
    data={"epoch": 1, "row": 2**60, "files": ["a.jsonl"], "deep": {"x": [None, True, "é"]}},
    rng={"seed": 0, "torch": "00ff"},
    numerics={"micro_batch": 4},
    loss_scale={"scale": 65536.0, "clean_steps": 12},
)


def test_a_state_comes_back_as_it_went(tmp_path: Path) -> None:
    FULL.save(tmp_path)

    assert TrainingState.load(tmp_path) == FULL


def test_what_is_empty_is_left_out_and_comes_back(tmp_path: Path) -> None:
    state = TrainingState(step=0, software=Software())
    state.save(tmp_path)

    assert TrainingState.load(tmp_path) == state
    assert set(json.loads((tmp_path / STATE).read_text())) == {"version", "step", "software"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "lists for tuples"),
        ({1: 2}, "texts for keys"),
        ({"a": [(1,)]}, "lists for tuples"),
        (float("nan"), "must be plain JSON"),
        ({"a": float("inf")}, "must be plain JSON"),
        (torch.zeros(1), "must be plain JSON"),
    ],
)
def test_what_would_come_back_changed_is_refused(value: object, message: str) -> None:
    for field in ("schedule", "data", "rng", "numerics", "loss_scale"):
        with pytest.raises(StateError, match=f"^{field}: .*{message}"):
            TrainingState(step=0, software=Software(), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version: is 2, but this Penstock reads versions up to 1; upgrade"),
        ({"version": 0}, "version: must be 1, got 0"),
        ({"step": -1}, "step: must be 0 or more"),
        ({"step": None}, "step: must be a whole number"),
        ({"stepp": 1}, "stepp: is not a field here"),
        ({"software": {"torhc": "2"}}, r"software\.torhc: is not a field here; did you mean torch"),
    ],
)
def test_a_file_that_is_not_right_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    FULL.save(tmp_path)
    path = tmp_path / STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StateError, match=f"{STATE}: {message}") as caught:
        TrainingState.load(tmp_path)

    assert isinstance(caught.value, CheckpointError)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=f"{STATE}: cannot be read: No such file"):
        TrainingState.load(tmp_path)


def test_a_resume_elsewhere_says_what_differs() -> None:
    now = Software.here()
    assert now.penstock == __version__
    assert now.torch == torch.__version__
    assert now.differences(now) == ()

    was = Software(torch="2.6", transformers=now.transformers, penstock=__version__, gpu="H200")
    here = Software(torch="2.7", transformers=now.transformers, penstock=__version__)
    assert was.differences(here) == ("torch was 2.6 and is 2.7", "gpu was H200 and is none")
