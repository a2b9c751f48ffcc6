"""A resume that names another model, another adapter, or data that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine import prepare
from penstock.settings import read_yaml
from tests.train.runs import RESIDENT, RunResult, Runs, make_model, run_command

Whole = tuple[Path, RunResult]


@pytest.fixture
def out(whole: Whole, tmp_path: Path) -> Path:
    """A copy of a run of six steps, which may be resumed."""
    shutil.copytree(whole[0], tmp_path / "out")
    return tmp_path / "out"


def resume(out: Path, *more: str) -> RunResult:
    return run_command(["train", *more, "--out", str(out), "--resume", "--json"])


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("it must be refused before this is called")


def test_another_model_is_refused_before_anything_is_allocated(
    out: Path, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_model(tmp_path / "other", num_hidden_layers=2)
    before = (out / "run.yaml").read_bytes()
    monkeypatch.setattr(prepare, "prepare", never)

    ended = resume(out, str(other), "--steps", "8")

    assert ended.code == 1
    assert f"{out} is a run of {runs.model}, and you passed {other}" in ended.errors
    assert "Leave the model out to continue, or choose another --out" in ended.errors
    assert (out / "run.yaml").read_bytes() == before


def test_another_model_of_the_same_sizes_is_refused_while_the_first_is_there(
    out: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other")

    ended = resume(out, str(other), "--steps", "8")

    assert ended.code == 1
    assert f"and you passed {other}" in ended.errors


def test_another_model_is_refused_without_a_checkpoint(out: Path, tmp_path: Path) -> None:
    for folder in out.glob("checkpoint-*"):
        shutil.rmtree(folder)

    ended = resume(out, str(make_model(tmp_path / "other")))

    assert ended.code == 1
    assert "is a run of" in ended.errors


def test_another_path_to_the_same_directory_is_the_same_model(
    out: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.model.parent)

    ended = resume(out, runs.model.name, "--steps", "7")

    assert ended.code == 0, ended.errors
    assert read_yaml(out / "run.yaml")["model"] == str(runs.model)


@pytest.mark.parametrize("layers", [3, 2], ids=["the same sizes", "other sizes"])
def test_a_model_that_was_moved_may_be_named(layers: int, runs: Runs, tmp_path: Path) -> None:
    first, out = make_model(tmp_path / "first"), tmp_path / "out"
    flags = runs.flags(out, *RESIDENT, "--steps", "1")
    flags[1] = str(first)
    assert run_command(flags).code == 0
    shutil.rmtree(first)
    moved = make_model(tmp_path / "moved", num_hidden_layers=layers)

    ended = resume(out, str(moved), "--steps", "2")

    if layers != 3:
        assert f"{out} is a run of {first}" in ended.errors
        return
    assert ended.code == 0, ended.errors
    assert f"the run's model was {first}, and is {moved} now" in ended.errors
    assert read_yaml(out / "run.yaml")["model"] == str(first)
    assert "fine-tuned from first with" in (out / "README.md").read_text().replace("\n", " ")


def test_a_card_says_which_weights_the_run_started_from(out: Path) -> None:
    ended = resume(out, "--init", "random", "--steps", "7")

    assert ended.code == 0, ended.errors
    assert "--init random has no effect: the run started from pretrained weights" in ended.errors
    assert "random weights" not in (out / "README.md").read_text()
    assert read_yaml(out / "run.yaml")["init"] == "pretrained"


def test_an_adapter_cannot_be_added_to_a_run(
    out: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "prepare", never)

    ended = resume(out, "--lora", "r=4,alpha=8", "--steps", "8")

    assert ended.code == 1
    assert "this run trains all parameters; --lora cannot be added on resume" in ended.errors
    assert f"penstock train {runs.model} --lora r=4,alpha=8 --out NEW" in ended.errors


def test_a_run_of_an_adapter_needs_its_adapter(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, config = tmp_path / "out", tmp_path / "changes.yaml"
    assert runs.run(out, *RESIDENT, "--lora", "r=2,alpha=4", "--steps", "1").code == 0
    config.write_text("lora: []\n")
    monkeypatch.setattr(prepare, "prepare", never)

    ended = resume(out, "--config", str(config), "--steps", "2")
    assert ended.code == 1
    assert "this run trains a LoRA adapter; it cannot continue without one" in ended.errors
    assert "Resume with --lora r=2,alpha=4" in ended.errors

    ended = resume(out, "--lora", "r=4,alpha=4", "--steps", "2")
    assert ended.code == 1
    assert "lora was ['r=2', 'alpha=4'] and is ['r=4', 'alpha=4']" in ended.errors


def test_other_frozen_tensors_are_named_by_their_setting(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "prepare", never)

    ended = resume(out, "--freeze", "model.embed_tokens.*", "--steps", "8")

    assert ended.code == 1
    assert "freeze was [] and is ['model.embed_tokens.*']" in ended.errors
    assert "fingerprint" not in ended.errors


def test_data_of_the_run_that_is_gone_is_named_with_a_remedy(out: Path, tmp_path: Path) -> None:
    ended = resume(out, "--data", str(tmp_path / "gone.jsonl"), "--steps", "8")

    assert ended.code == 1
    assert "gone.jsonl: no such file" in ended.errors
    assert "the run's data is missing; copy it, or pass --data NEW_PATH" in ended.errors


def test_data_that_cannot_be_read_is_not_called_missing(out: Path, tmp_path: Path) -> None:
    (tmp_path / "data.xyz").write_text("?")

    ended = resume(out, "--data", str(tmp_path / "data.xyz"), "--steps", "8")

    assert "has an unknown format" in ended.errors
    assert "is missing" not in ended.errors
