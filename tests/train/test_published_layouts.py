"""`penstock train` on checkpoints with the layouts of published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.engines import plain_model, tiny_config
from tests.support.fp8_files import save_fp8
from tests.support.multimodal_files import CONFIGS, check_kept, save_multimodal
from tests.support.samples import sample
from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.train.runs import RESIDENT, make_texts, run_command
from tests.train.test_session import stop_in_step


def flags(model: Path, folder: Path, out: Path, *more: str) -> list[str]:
    data = folder / "texts.jsonl"
    if not data.exists():
        make_texts(data)
    return [
        "train", str(model), "--data", str(data), "--out", str(out), "--context", "32",
        "--batch", "4", "--lr", "1e-2", "--cache", str(folder / "cache"), "--json", *RESIDENT,
        *more,
    ]  # fmt: skip


@pytest.mark.parametrize("family", sample(CONFIGS, ("gemma3",)))
def test_a_multimodal_model_trains_resumes_and_loads_in_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = small_tokenizer(MARKED)
    source = save_multimodal(tmp_path / "model", family, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(source)
    (source / "preprocessor_config.json").write_text("{}")
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    first = run_command(flags(source, tmp_path, whole, "--steps", "4"))
    assert first.code == 0, first.errors
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3)
        run_command(flags(source, tmp_path, parts, "--steps", "4", "--keep", "1"))
    source.rename(tmp_path / "moved")
    done = run_command(["train", "--out", str(parts), "--resume", "--json"])
    assert done.code == 0, done.errors

    assert list(done.losses) == [4]
    check_kept(tmp_path / "moved", whole)
    assert (parts / "preprocessor_config.json").is_file()
    saved = [(folder / "model.safetensors").read_bytes() for folder in (whole, parts)]
    assert saved[0] == saved[1]
    model = transformers.AutoModelForImageTextToText.from_pretrained(parts)
    assert type(model).__name__ == CONFIGS[family]["architectures"][0]


def test_an_fp8_model_trains_and_loads_in_transformers(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(MARKED)
    config = tiny_config("llama", vocab_size=len(tokenizer), hidden_size=40)
    source = save_fp8(plain_model(config), tmp_path / "model")
    tokenizer.save_pretrained(source)

    done = run_command(flags(source, tmp_path, tmp_path / "out", "--steps", "2"))

    assert done.code == 0, done.errors
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(model.config, "quantization_config")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[0].mlp.up_proj.weight.abs().max() < 1
