"""`penstock check` on runs, checkpoints and models, intact and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.manifests import make_old_manifest, sign
from tests.train.runs import RESIDENT, Runs, run_command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("check"))


@pytest.fixture(scope="module")
def finished(runs: Runs) -> Path:
    out = runs.folder / "out"
    ended = runs.run(out, *RESIDENT, "--steps", "2", "--save-every", "1")
    assert ended.code == 0, ended.errors
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path, byte: int = -3) -> None:
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 16
    path.write_bytes(raw)


def test_an_intact_run_checkpoint_and_model_pass(out: Path, runs: Runs) -> None:
    ended = run_command(["check", str(out)])
    assert ended.code == 0, ended.output
    assert "checkpoint-000002" in ended.output
    assert ended.output.splitlines()[-1] == "intact; the newest step to resume from is 2"
    assert run_command(["check", str(out / "checkpoint-000001")]).code == 0
    model = run_command(["check", str(runs.model)])
    assert model.output.splitlines()[-1] == "intact; 1 of 1 without checksums"


def test_the_report_as_json(out: Path) -> None:
    flip(out / "checkpoint-000002" / "optimizer.safetensors")
    ended = run_command(["check", str(out), "--json"])
    report = json.loads(ended.output)

    assert ended.code == 1
    assert report["intact"] is False
    assert len(report["run_id"]) == 16
    newest, older, model = report["parts"]
    assert (newest["step"], older["step"], model["path"]) == (2, 1, str(out))
    assert [len(part["problems"]) for part in report["parts"]] == [1, 0, 0]
    assert "optimizer.safetensors: tensor" in report["problems"][0]
    assert report["verdict"] == "DAMAGED: 1 problem; the newest step to resume from is 1"


def flip_everywhere(folder: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors", "tokenizer.json", "run.yaml"):
        flip(folder / name)


def truncate(folder: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-1])


def remove(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def rename_run(folder: Path) -> None:
    path = folder / "complete.json"
    path.write_text(sign(json.dumps(json.loads(path.read_text()) | {"run_id": "0" * 16})))


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (flip_everywhere, ["model.safetensors: tensor", "optimizer.safetensors: tensor",
                           "tokenizer.json: the disk", "run.yaml: the disk"]),
        (lambda folder: flip(folder / "complete.json", 30), ["its complete.json"]),
        (truncate, ["model.safetensors has"]),
        (remove, ["tokenizer.json: No such file"]),
        (rename_run, ["the checkpoint was written by the run 0000000000000000"]),
        (lambda folder: (folder / "complete.json").unlink(), ["has no complete.json"]),
        (lambda folder: flip(folder / "model.safetensors", 3), ["model.safetensors"]),
    ],
    ids=["flips", "manifest", "short", "missing", "foreign", "unfinished", "header"],
)  # fmt: skip
def test_every_damage_is_listed(
    out: Path, damage: Callable[[Path], object], texts: list[str]
) -> None:
    damage(out / "checkpoint-000002")
    ended = run_command(["check", str(out)])

    assert ended.code == 1
    for text in texts:
        assert f"checkpoint-000002/{text}" in ended.output or text in ended.output
    assert "DAMAGED" in ended.output.splitlines()[-1]


def test_a_model_with_nan_or_without_a_tensor_is_damaged(runs: Runs, tmp_path: Path) -> None:
    folder = shutil.copytree(runs.model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    first, second = list(tensors)[:2]
    tensors[first].view(-1)[5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ended = run_command(["check", str(folder)])
    assert ended.code == 1
    assert f"tensor {first}: has NaN or infinity" in ended.output

    tensors[first].zero_()
    del tensors[second]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ended = run_command(["check", str(folder)])
    assert ended.code == 1
    assert f"has no tensor {second}" in ended.output


def test_a_run_of_an_earlier_version_is_checked_without_checksums(out: Path) -> None:
    for folder in out.glob("checkpoint-*"):
        make_old_manifest(folder)
    text = (out / "run.yaml").read_text()
    (out / "run.yaml").write_text("\n".join(t for t in text.split("\n") if "run_id" not in t))
    ended = run_command(["check", str(out)])

    assert ended.code == 0, ended.output
    assert "2 of 3 without checksums" in ended.output


def test_a_directory_of_something_else_is_an_error(tmp_path: Path) -> None:
    ended = run_command(["check", str(tmp_path)])
    assert ended.code == 1
    assert "is neither a run, nor a checkpoint, nor a model" in ended.errors
