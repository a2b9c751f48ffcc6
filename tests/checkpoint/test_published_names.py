"""Files with the tensor names of published models are read as transformers reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.checkpoint.errors import CheckpointWarning
from penstock.engine.model_source import check_weights
from penstock.model.checkpoint_names import _own_names
from penstock.model.survey import survey
from tests.checkpoint.test_model_weights import read_all
from tests.conformance_models.tiny import tiny_config

Shapes = Mapping[str, tuple[int, ...]]


def same(name: str) -> str:
    return name


def without(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for old, new in pairs:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        return name

    return rename


@dataclass(frozen=True)
class Layout:
    """How published files of a family differ from what transformers saves today."""

    family: str
    rename: Callable[[str], str] = same
    """Returns the published name of a tensor."""
    buffers: Shapes = field(default_factory=dict)
    """Buffers of old files that the model computes today."""
    unexpected: Shapes = field(default_factory=dict)
    """Weights that the class does not have."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config."""


TIED = {"tie_word_embeddings": True}
MASKS = {"attn.bias": (1, 1, 8, 8), "attn.masked_bias": ()}


def in_layers(path: str, buffers: Shapes) -> dict[str, tuple[int, ...]]:
    return {f"{path}.{i}.{name}": shape for i in range(3) for name, shape in buffers.items()}


LAYOUTS = {
    "Llama-2": Layout(
        "llama", buffers=in_layers("model.layers", {"self_attn.rotary_emb.inv_freq": (4,)})
    ),
    "Llama-3.2, tied": Layout("llama", fields=TIED),
    "Qwen2.5, tied": Layout("qwen2", fields=TIED),
    "Qwen3": Layout("qwen3"),
    "Qwen3.5, text of multimodal files": Layout(
        "qwen3_5_text", replaced(("model.", "model.language_model.")),
        unexpected={"model.visual.patch_embed.proj.weight": (4, 3), "mtp.fc.weight": (4, 8),
                    "mtp.layers.0.mlp.up_proj.weight": (4, 4)},
    ),
    "Gemma 2": Layout("gemma2"),
    "Gemma 3": Layout("gemma3_text"),
    "Mistral": Layout("mistral"),
    "Phi-3": Layout("phi3"),
    "OLMo 2": Layout("olmo2"),
    "Granite": Layout("granite", fields=TIED),
    "SmolLM 3": Layout("smollm3", fields=TIED),
    "StarCoder 2": Layout("starcoder2"),
    "Cohere": Layout("cohere"),
    "EXAONE 4": Layout("exaone4"),
    "LFM2": Layout("lfm2", fields=TIED),
    "NanoChat": Layout("nanochat"),
    "Pythia": Layout(
        "gpt_neox", replaced(("lm_head.", "embed_out.")),
        buffers=in_layers("gpt_neox.layers", {
            "attention.bias": (1, 1, 8, 8), "attention.masked_bias": (),
            "attention.rotary_emb.inv_freq": (2,)}),
    ),
    "GPT-2": Layout("gpt2", without("transformer."), buffers=in_layers("h", MASKS)),
    "DistilGPT-2": Layout("gpt2", buffers=in_layers("transformer.h", MASKS)),
    "OPT": Layout("opt"),
    "OPT, first files": Layout("opt", without("model.")),
    "BLOOM": Layout("bloom", without("transformer.")),
    "Falcon": Layout("falcon"),
    "MPT": Layout("mpt"),
    "GPT-J": Layout("gptj", buffers=in_layers("transformer.h", MASKS)),
    "DeepSeek-like layers after the last": Layout(
        "llama", unexpected={"model.layers.61.eh_proj.weight": (4, 8)}
    ),
}  # fmt: skip


def save_published(layout: Layout, folder: Path, *, head: bool) -> None:
    """Save a model with published names; `head`: also the head of a tied model.

    The buffers and unexpected tensors have values that would show if they were read.
    """
    config = tiny_config(layout.family)
    for name, value in layout.fields.items():
        setattr(config, name, value)
    torch.manual_seed(4)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape))
    named = model.named_parameters(remove_duplicate=not head)
    tensors = {layout.rename(name): tensor.detach().clone() for name, tensor in named}
    more = {n: torch.full(s, 7.0) for n, s in {**layout.buffers, **layout.unexpected}.items()}
    save_file({**tensors, **more}, folder / "model.safetensors")


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_published_files_are_read_as_transformers_reads_them(
    tmp_path: Path, layout: Layout, head: bool
) -> None:
    save_published(layout, tmp_path, head=head)
    plain, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]

    read = read_all(tmp_path, part=1 << 20)

    parameters = dict(plain.named_parameters())
    assert set(read) == set(parameters)
    for name, tensor in parameters.items():
        assert torch.equal(read[name], tensor), name


MORE = {name: layout for name, layout in LAYOUTS.items() if layout.buffers or layout.unexpected}


@pytest.mark.parametrize("layout", MORE.values(), ids=MORE.keys())
def test_only_weights_that_are_lost_are_named_in_a_warning(tmp_path: Path, layout: Layout) -> None:
    save_published(layout, tmp_path, head=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_weights(tmp_path, survey(tmp_path))

    messages = [str(w.message) for w in caught if w.category is CheckpointWarning]
    assert len(messages) == bool(layout.unexpected)
    for name in layout.unexpected:
        assert name in messages[0]
    for name in layout.buffers:
        assert not messages or name not in messages[0]


def test_files_without_the_first_part_of_the_names_or_with_one_more_are_read() -> None:
    """Models with code of their own: nothing renames their tensors."""
    inventory: Any = SimpleNamespace(layers=[SimpleNamespace(name="transformer.h.0")])
    wanted = {"transformer.h.0.a", "transformer.h.0.b", "lm_head.weight", "transformer.missing"}
    found = {"transformer.h.0.a", "h.0.b", "transformer.lm_head.weight", "other"}

    assert _own_names(found, wanted, inventory) == {
        "transformer.h.0.a": "transformer.h.0.a",
        "transformer.h.0.b": "h.0.b",
        "lm_head.weight": "transformer.lm_head.weight",
    }
