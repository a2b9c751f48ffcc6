"""Mistakes of the user: one message each, exit code 1, and an unchanged directory."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from penstock.engine.engine import Engine
from tests.support.small_tokenizers import small_tokenizer
from tests.train.runs import RESIDENT, Runs, make_model, run_command


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def no_shard(model: Path, data: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def torn_weights(model: Path, data: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_weights(model: Path, data: Path) -> None:
    (model / "model.safetensors").unlink()


def no_tokenizer(model: Path, data: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def no_template(model: Path, data: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    small_tokenizer(None).save_pretrained(model)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    data.write_text(json.dumps({"messages": chat}) + "\n")


def unknown_type(model: Path, data: Path) -> None:
    edit_config(model, model_type="no_such_model")


def other_shape(model: Path, data: Path) -> None:
    edit_config(model, intermediate_size=96)


def empty_data(model: Path, data: Path) -> None:
    data.write_text("")


def not_json(model: Path, data: Path) -> None:
    data.write_text('{"text": "fine"}\n{"text": \n')


def no_data(model: Path, data: Path) -> None:
    data.unlink()


def few_embeddings(model: Path, data: Path) -> None:
    make_model(model, vocab_size=300)


Spoil = Callable[[Path, Path], None]

CASES: dict[str, tuple[Spoil, str]] = {
    "model type": (unknown_type, "no_such_model"),
    "missing shard": (no_shard, "model-00001-of-00002.safetensors"),
    "corrupt weights": (torn_weights, "was interrupted"),
    "no weights": (no_weights, "has a config but no weights; pass --init random"),
    "another shape": (other_shape, "use weights and config.json of the same model"),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "no template": (no_template, "no chat template"),
    "empty data": (empty_data, "no example"),
    "a line that is not JSON": (not_json, "data.jsonl"),
    "no data": (no_data, "data.jsonl"),
    "tokens beyond the embedding": (few_embeddings, "embedding has 300 rows"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_is_reported_in_one_message(name: str, runs: Runs, tmp_path: Path) -> None:
    spoil, words = CASES[name]
    model, data = make_model(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_bytes(runs.data.read_bytes())
    spoil(model, data)
    flags = runs.flags(tmp_path / "out", *RESIDENT, "--steps", "1")
    flags[flags.index(str(runs.data))] = str(data)
    flags[1] = str(model)

    ended = run_command([f for f in flags if f not in ("--eval-split", "0.2")])

    assert ended.code == 1, ended.errors
    assert words in ended.errors
    assert ended.errors.count("error: ") == 1
    assert "Traceback" not in ended.errors
    assert not (tmp_path / "out/model.safetensors").exists()


def test_missing_weights_are_reported_before_the_data_is_read(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", weights=False)
    flags = runs.flags(tmp_path / "out", *RESIDENT, "--steps", "1")
    flags[1] = str(model)
    monkeypatch.setattr("penstock.train.session.load_data", None)

    ended = run_command(flags)

    assert ended.code == 1, ended.errors
    assert f"{model} has a config but no weights" in ended.errors


def test_a_batch_with_a_bad_token_is_named_and_saved(runs: Runs, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", vocab_size=300)
    flags = runs.flags(tmp_path / "out", *RESIDENT, "--steps", "1")
    flags[1] = str(model)

    ended = run_command([f for f in flags if f not in ("--eval-split", "0.2")])

    assert ended.code == 1, ended.errors
    found = re.search(r"input_ids is (\d+) in row (\d+), column (\d+)", ended.errors)
    assert found is not None, ended.errors
    token, row, column = map(int, found.groups())
    saved = load_file(tmp_path / "out/bad-batch-000001.safetensors")
    assert int(saved["input_ids"][row, column]) == token >= 300


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--dram", "5"], "dram: '5' has no unit"), (["--hbm", "lots"], "hbm: 'lots' is not a size"),
     (["--nvme", "/tmp:lots"], "nvme: must be PATH or PATH:SIZE"),
     (["--nvme", "/no/such/place"], "nvme: /no/such/place is neither a directory nor")],
)  # fmt: skip
def test_a_misspelled_budget_is_an_error_before_the_data_is_read(
    runs: Runs, tmp_path: Path, flags: list[str], words: str
) -> None:
    arguments = runs.flags(tmp_path / "out", *flags)
    arguments[arguments.index(str(runs.data))] = str(tmp_path / "missing.jsonl")

    ended = run_command(arguments)

    assert ended.code == 1
    assert words in ended.errors


FLAGS: dict[str, tuple[list[str], str]] = {
    "context": (["--context", "4096"], "--model-config max_position_embeddings=4096"),
    "budget": (["--hbm", "64KiB"], "it fits with --hbm"),
    "logger": (["--log", "wandb"], "the package wandb: pip install wandb"),
    "config key": (["--model-config", "no_such=1"], "no_such"),
    "disk": (["--nvme", "/no/such/place:1GiB", "--dram", "64KiB"], "/no/such/place"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_an_impossible_flag_is_reported_before_anything_is_written(
    name: str, runs: Runs, tmp_path: Path
) -> None:
    more, words = FLAGS[name]

    ended = runs.run(tmp_path / "out", *RESIDENT, "--steps", "1", *more)

    assert ended.code == 1, ended.errors
    assert words in ended.errors
    assert not (tmp_path / "out").exists()


USAGE: dict[str, list[str]] = {
    "both lengths": ["--steps", "2", "--epochs", "1"],
    "an interval": ["--steps", "2", "--save-every", "soon"],
    "betas": ["--steps", "2", "--betas", "0.9"],
    "a batch": ["--steps", "2", "--batch", "0"],
    "a change": ["--steps", "2", "--model-config", "rope_theta"],
    "no such flag": ["--nonsense"],
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_exits_with_2(name: str, runs: Runs, tmp_path: Path) -> None:
    assert runs.run(tmp_path / "out", *USAGE[name]).code == 2


@pytest.mark.parametrize("missing", ["MODEL", "--data", "--out"])
def test_a_missing_argument_is_a_usage_error(missing: str) -> None:
    given = {"MODEL": ["m"], "--data": ["--data", "d"], "--out": ["--out", "o"]}
    flags = [word for name, words in given.items() if name != missing for word in words]

    ended = run_command(["train", *flags])

    assert ended.code == 2
    assert f"{missing} is missing: name" in ended.errors
    assert "Invalid value" not in ended.errors


def test_a_directory_that_is_not_empty_is_not_touched(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    ended = runs.run(tmp_path, *RESIDENT, "--steps", "1")

    assert ended.code == 1
    assert "notes.txt" in ended.errors
    assert "--resume" in ended.errors
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unknown_key_in_a_settings_file_is_named(runs: Runs, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"learning_rate": 1e-4}))

    ended = runs.run(tmp_path / "out", "--config", str(config))

    assert ended.code == 1
    assert f"{config}: learning_rate" in ended.errors


def test_an_empty_list_of_data_is_reported_with_its_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"model": "model", "data": []}))

    ended = run_command(["train", "--config", str(config), "--out", str(tmp_path / "out")])

    assert ended.code == 1
    assert f"{config}: data: must name at least one file" in ended.errors
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_saves_the_batch(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    spoil_step(monkeypatch, 3)
    ended = runs.run(out, *RESIDENT, "--steps", "5")

    assert ended.code == 1
    assert "step 3" in ended.errors
    assert load_file(out / "bad-batch-000003.safetensors")["input_ids"].shape == (4, 32)
    assert "capital" in (out / "bad-batch-000003.txt").read_text()
    assert [event["step"] for event in ended.of("save")] == [2]
    monkeypatch.undo()
    again = run_command(["train", "--out", str(out), "--resume", "--json"])
    assert list(again.losses) == [3, 4, 5], again.errors


def spoil_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make the loss of one step NaN where the engine checks it."""
    plain = Engine._check_finite

    def check(self: Engine, loss: torch.Tensor) -> None:
        plain(self, loss * float("nan") if self.batches == number else loss)

    monkeypatch.setattr(Engine, "_check_finite", check)


def test_an_out_of_memory_gpu_names_the_budget_to_lower(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Engine, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "step", refuse)
    # The self-check would train with it first, unless the user's cache says that it was passed.
    ended = runs.run(tmp_path / "out", *RESIDENT, "--steps", "1", "--no-self-check")

    assert ended.code == 1
    assert "for training" in ended.errors
    assert "raise --hbm" in ended.errors or "plan with --hbm" in ended.errors


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_failing_file_system_is_named(
    code: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("penstock.train.session.write_yaml", fail)

    ended = runs.run(tmp_path / "out", *RESIDENT, "--steps", "1")

    assert ended.code == 1
    assert f"error: {tmp_path / 'out'}: {os.strerror(code)}" in ended.errors
    assert "Traceback" not in ended.errors


def test_a_deleted_current_directory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    ended = run_command(["plan", "model"])

    assert ended.code == 1
    assert "the current directory does not exist any more" in ended.errors
