"""`engine.write` saves a directory that transformers loads, with the tokenizer if it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.checkpoint.errors import CheckpointWriteError
from penstock.engine.engine import Engine
from penstock.engine.prepare import prepare
from tests.support.engines import plain_model, tiny_config
from tests.support.small_tokenizers import small_tokenizer

SMALL: dict[str, Any] = {
    "context": 32, "batch": 2, "device": "cpu", "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def save_model(folder: Path, **changes: Any) -> Path:
    plain_model(tiny_config("llama", **changes)).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def check_loads(folder: Path, engine: Engine) -> Any:
    """Load the directory with transformers, and compare all weights with the engine's."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, engine.state[name]["weight"]), name
    return loaded


@pytest.mark.parametrize("tied", [False, True])
def test_a_missing_directory_is_created_and_transformers_loads_it(
    tmp_path: Path, tied: bool
) -> None:
    source = save_model(tmp_path / "model", tie_word_embeddings=tied)
    ids = torch.randint(3, 260, (2, 32))

    with prepare(source, lr=1e-2, **SMALL) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        engine.write(tmp_path / "a" / "b")
        loaded = check_loads(tmp_path / "a" / "b", engine)

    assert loaded.config.tie_word_embeddings == tied
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a" / "b")
    assert tokenizer("Paris")["input_ids"] == small_tokenizer()("Paris")["input_ids"]


def test_a_live_model_brings_the_tokenizer_of_the_directory_it_was_loaded_from(
    tmp_path: Path,
) -> None:
    source = save_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.generation_config.max_length = 77

    with prepare(model, **SMALL) as engine:
        engine.write(tmp_path / "out", optimizer=False)
        loaded = check_loads(tmp_path / "out", engine)

    assert loaded.generation_config.max_length == 77
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert not list((tmp_path / "out").glob("optimizer*"))


def test_a_tokenizer_can_be_passed_for_a_model_that_was_never_a_file(tmp_path: Path) -> None:
    with prepare(plain_model(tiny_config("llama")), **SMALL) as engine:
        engine.write(tmp_path / "without")
        engine.write(tmp_path / "with", tokenizer=small_tokenizer())
        check_loads(tmp_path / "without", engine)

    assert not (tmp_path / "without/tokenizer.json").exists()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "with")("Rome")["input_ids"]


def test_a_second_model_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with prepare(plain_model(tiny_config("llama")), **SMALL) as engine:
        engine.write(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(CheckpointWriteError, match=r"File exists.*choose another directory"):
            engine.write(tmp_path)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
