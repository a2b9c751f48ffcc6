"""Published file formats are trained as transformers reads them, or refused before allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from penstock.checkpoint.errors import TensorNotFoundError
from penstock.cli.plan import plan_command
from penstock.engine import engine as engine_module
from penstock.engine.prepare import prepare
from penstock.model.config import load_config
from penstock.model.survey import survey
from penstock.settings import Settings
from penstock.train.checkpoints import write_model_files
from tests.support.engines import plain_model, tiny_config
from tests.support.fp8_files import save_fp8

SMALL: dict[str, Any] = {
    "context": 32, "batch": 2, "device": "cpu", "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def save(source: Path, out: Path, settings: Settings | None = None) -> None:
    """Load a model into an engine, and save it as `penstock train` does."""
    out.mkdir()
    with prepare(source, **SMALL) as engine:
        config = load_config(source)
        write_model_files(out, source, config, engine.inventory, settings or Settings())
        engine.write(out, optimizer=False)


def test_an_fp8_model_is_saved_unquantized(tmp_path: Path) -> None:
    source = save_fp8(plain_model(tiny_config("llama", hidden_size=40)), tmp_path / "fp8")
    expected = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)

    save(source, tmp_path / "out")

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in fields
    assert saved.dtype == torch.bfloat16
    for name, tensor in expected.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name


def test_a_missing_tensor_is_an_error_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_model(tiny_config("llama")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(engine_module, "Engine", None)  # creating one would be a TypeError

    with pytest.raises(TensorNotFoundError, match=r"no tensor model\.norm\.weight"):
        prepare(tmp_path, **SMALL)
    survey(tmp_path)  # the config alone is right

    arguments = ["plan", str(tmp_path), "--context", "32", "--machine", "desktop-24gb"]
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("plan")(plan_command)
    app.command("other")(lambda: None)  # with a single command, typer takes no name
    assert isinstance(CliRunner().invoke(app, arguments).exception, TensorNotFoundError)
