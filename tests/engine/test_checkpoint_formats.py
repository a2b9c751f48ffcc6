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
from penstock.errors import UnsupportedModelError
from penstock.model import text_stack
from penstock.model.survey import survey
from penstock.model.survey_cache import cached_survey
from tests.support.engines import plain_model, tiny_config
from tests.support.fp8_files import save_fp8
from tests.support.multimodal_files import CONFIGS, check_kept, save_multimodal

SMALL: dict[str, Any] = {
    "context": 32, "batch": 2, "device": "cpu", "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def save(source: Path, out: Path) -> None:
    """Load a model into an engine, and save it."""
    with prepare(source, **SMALL) as engine:
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


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_takes_stored_weights_as_they_are(stored: torch.dtype, tmp_path: Path) -> None:
    """Weights in fp32 are not rounded, and those in 16 bits are widened, which is exact."""
    model = plain_model(tiny_config("llama"), stored)
    model.save_pretrained(tmp_path)

    with prepare(tmp_path, dtype="fp32", **SMALL) as engine:
        for name, tensor in model.state_dict().items():
            state = engine.state[name]
            assert torch.equal(state["weight"], tensor.float()), name
            assert torch.equal(state["master"], state["weight"]), name


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


# The text stack of multimodal models.


def text_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(11, 60, (2, 32), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def plain_loss(folder: Path) -> float:
    """Return the loss of the class that the config names, on text, in fp32."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    batch = text_batch()
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:].flatten()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets))


@pytest.mark.parametrize(
    ("family", "published"),
    [
        # tests/train/test_published_layouts.py trains and saves a model with another of them.
        ("qwen3_5", True),
        *(
            pytest.param(family, published, marks=pytest.mark.long)
            for family in CONFIGS
            for published in (True, False)
            if (family, published) != ("qwen3_5", True)
        ),
    ],
)
def test_the_text_stack_of_a_multimodal_model_is_trained_and_the_rest_is_kept(
    tmp_path: Path, family: str, published: bool
) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    save_multimodal(source, family, published=published)
    before, out_again = plain_loss(source), tmp_path / "again"

    with prepare(source, lr=1e-2, **SMALL) as engine:
        assert float(engine.evaluate([text_batch()]).loss) == pytest.approx(before, abs=0.02)
        for _ in range(5):
            engine.step(text_batch())
        engine.write(out)
        after = float(engine.evaluate([text_batch()]).loss)

    assert after < before - 0.3
    assert plain_loss(out) == pytest.approx(after, abs=0.02)
    check_kept(source, out)
    model = transformers.AutoModelForImageTextToText.from_pretrained(out)
    assert type(model).__name__ == CONFIGS[family]["architectures"][0]
    assert model.dtype == torch.bfloat16

    # A checkpoint continues where it ended, also if the original is gone and it is itself deleted.
    with prepare(out, init="none", **SMALL) as engine:
        engine.read(out)
        assert float(engine.evaluate([text_batch()]).loss) == after
        saved = {path.name: path.read_bytes() for path in out.glob("model*")}
        for path in out.glob("model*"):
            path.unlink()
        engine.write(out_again)
    assert {path.name: path.read_bytes() for path in out_again.glob("model*")} == saved


def test_a_missing_tensor_of_a_text_stack_is_refused(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "model", "mistral3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorNotFoundError, match=r"no tensor model\.layers\.1\.mlp\.up_proj"):
        prepare(folder, **SMALL)


def test_random_weights_of_a_multimodal_model_are_refused(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "model", "gemma3")
    with pytest.raises(UnsupportedModelError, match=r"multimodal.*random"):
        prepare(folder, init="random", **SMALL)


def test_a_multimodal_model_whose_head_scales_logits_otherwise_is_refused(tmp_path: Path) -> None:
    config = transformers.AyaVisionConfig(
        text_config={"model_type": "cohere2", "logit_scale": 0.25},
        vision_config={"model_type": "siglip_vision_model", "num_attention_heads": 16},
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="its logits are 4 times those of Cohere2"):
        survey(tmp_path)


def test_a_multimodal_model_that_needs_an_image_is_refused(tmp_path: Path) -> None:
    config = transformers.InstructBlipConfig(text_config={"model_type": "opt"})
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="requires pixel_values and qformer_input_ids"):
        survey(tmp_path)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (ImportError("\nTimmWrapperModel requires the timm library but it was"), "package timm,"),
        (ModuleNotFoundError("No module named 'scipy.x'", name="scipy.x"), "package scipy,"),
        (ImportError("no such backend"), r"a package that is not installed \(no such backend\)"),
    ],
)
def test_a_package_that_a_tower_needs_is_named(
    problem: ImportError, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_multimodal(tmp_path / "model", "mistral3")

    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(transformers.Mistral3ForConditionalGeneration, "_from_config", fail)
    text_stack._cached_problem.cache_clear()
    with pytest.raises(UnsupportedModelError, match=f"cannot build it without.*{reason}"):
        survey(folder)
    text_stack._cached_problem.cache_clear()


def test_a_text_stack_without_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    transformers.Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no causal language model of the type"):
        survey(tmp_path)


def test_a_multimodal_model_without_a_text_config_is_refused(tmp_path: Path) -> None:
    transformers.Phi4MultimodalConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no text_config"):
        survey(tmp_path)


def test_the_tie_of_the_outer_model_decides(tmp_path: Path) -> None:
    folder = save_multimodal(tmp_path / "model", "mistral3")
    assert not cached_survey(folder)[1].tied
    tensors = load_file(folder / "model.safetensors")
    head, table = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    save_file(tensors | {head: tensors[table].clone()}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"{head} equals {table}"):
        prepare(folder, **SMALL)

    del tensors[head]
    save_file(tensors, folder / "model.safetensors")
    assert cached_survey(folder)[1].tied
    with prepare(folder, **SMALL) as engine:
        assert engine.inventory.tied
        loss = float(engine.evaluate([text_batch()]).loss)
    assert loss == pytest.approx(plain_loss(folder), abs=0.02)

    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    fields["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(TensorNotFoundError, match=r"no tensor lm_head\.weight"):
        prepare(folder, **SMALL)
