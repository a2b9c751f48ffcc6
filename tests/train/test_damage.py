"""Damaged and foreign checkpoints: a resume falls back to the older one, or refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.settings import read_run_id, read_yaml
from tests.support.manifests import sign, with_file
from tests.train.runs import contents, run_command
from tests.train.test_session import Whole


@pytest.fixture
def out(whole: Whole, tmp_path: Path) -> Path:
    """A copy of a finished run with checkpoints of steps 4 and 6."""
    shutil.copytree(whole[0], tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path, byte: int = -3) -> None:
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 16
    path.write_bytes(raw)


def resume(out: Path) -> tuple[int, str, dict[int, float]]:
    ended = run_command(["train", "--out", str(out), "--resume", "--json"])
    return ended.code, ended.errors, ended.losses


@pytest.mark.filterwarnings("ignore:.*already existed and was not a complete checkpoint")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.safetensors", "model.safetensors: tensor"),
        ("optimizer.safetensors", "optimizer.safetensors: tensor"),
        ("tokenizer.json", "tokenizer.json: the disk returned different bytes"),
        ("training_state.json", "training_state.json: the disk returned different bytes"),
        ("complete.json", "its complete.json"),
    ],
)
def test_a_resume_falls_back_to_the_older_checkpoint(
    whole: Whole, out: Path, name: str, reason: str
) -> None:
    newest, older = out / "checkpoint-000006", out / "checkpoint-000004"
    flip(newest / name)
    code, errors, losses = resume(out)

    assert code == 0, errors
    assert reason in errors
    assert str(newest) in errors
    assert f"resuming from {older}" in errors
    assert losses == {step: whole[1].losses[step] for step in (5, 6)}
    (aside,) = out.glob("checkpoint-000006.damaged-*")
    shutil.rmtree(aside)
    assert contents(out) == contents(whole[0])


def test_no_intact_checkpoint_is_an_error_that_names_all(out: Path) -> None:
    for step in (4, 6):
        flip(out / f"checkpoint-00000{step}" / "optimizer.safetensors")
    before = sorted(path.name for path in out.iterdir())
    code, errors, losses = resume(out)

    assert (code, losses) == (1, {})
    assert "error: " + str(out / "checkpoint-000006" / "optimizer.safetensors: tensor") in errors
    assert f"also: {out / 'checkpoint-000004'}, the older checkpoint, is damaged" in errors
    assert sorted(path.name for path in out.iterdir()) == before


def test_all_files_of_a_run_have_its_id(out: Path) -> None:
    run_id = read_run_id(out / "run.yaml")
    assert len(run_id) == 16
    for path in out.glob("**/complete.json"):
        assert json.loads(path.read_text())["run_id"] == run_id
    for path in out.glob("checkpoint-*/run.yaml"):
        assert read_run_id(path) == run_id
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ids = {event["run_id"] for event in events if event["event"] in ("save", "done")}
    assert ids == {run_id}
    assert "run_id" not in read_yaml(out / "run.yaml")  # so that --config does not copy it


def test_a_checkpoint_of_another_run_is_refused(out: Path) -> None:
    path = out / "checkpoint-000006" / "complete.json"
    document = json.loads(path.read_text())
    own, document["run_id"] = document["run_id"], "0123456789abcdef"
    path.write_text(sign(json.dumps(document)))
    code, errors, losses = resume(out)

    assert (code, losses) == (1, {})
    assert f"{path.parent}: the checkpoint was written by the run 0123456789abcdef" in errors
    assert f"belongs to the run {own}" in errors


def test_a_run_keeps_its_id_without_run_yaml(out: Path) -> None:
    run_id = read_run_id(out / "run.yaml")
    (out / "run.yaml").unlink()
    shutil.rmtree(out / "checkpoint-000006")
    code, errors, _ = resume(out)

    assert code == 0, errors
    assert read_run_id(out / "run.yaml") == run_id
    manifest = json.loads((out / "checkpoint-000006" / "complete.json").read_text())
    assert manifest["run_id"] == run_id


def test_a_damaged_tokenizer_in_out_does_not_reach_new_checkpoints(out: Path) -> None:
    good = (out / "tokenizer.json").read_bytes()
    shutil.rmtree(out / "checkpoint-000006")
    flip(out / "tokenizer.json", 200)
    code, errors, _ = resume(out)

    assert code == 0, errors
    assert (out / "checkpoint-000006" / "tokenizer.json").read_bytes() == good
    assert (out / "tokenizer.json").read_bytes() == good


def test_generating_from_a_damaged_model_is_refused(out: Path) -> None:
    asked = ["generate", str(out), "--prompt", "the", "--max-new", "2"]
    assert run_command(asked).code == 0
    flip(out / "model.safetensors")
    ended = run_command(asked)

    assert ended.code == 1
    assert f"{out / 'model.safetensors'}: tensor" in ended.errors
    assert "the disk returned different bytes than were written" in ended.errors


def test_training_that_starts_from_a_damaged_checkpoint_is_refused(out: Path) -> None:
    folder = out / "checkpoint-000006"
    manifest = (folder / "complete.json").read_text()
    (folder / "complete.json").write_text(with_file(manifest, "run.yaml", None))
    flip(folder / "config.json", 40)
    data = read_yaml(out / "run.yaml")["data"][0]
    ended = run_command(["train", str(folder), "--data", data, "--out", str(out / "new")])

    assert ended.code == 1
    assert f"{folder / 'config.json'}: the disk returned" in ended.errors
    assert f"the older {out / 'checkpoint-000004'}" in ended.errors
