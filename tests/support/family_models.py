"""Tiny models of the families that people use, with the code paths of published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.conformance_models.tiny import tiny_config
from tests.support.multimodal_files import CONFIGS, save_multimodal


@dataclass(frozen=True)
class Family:
    """A tiny model with the code of a published one."""

    kind: str
    """Model type, or the name of a config that `tests.conformance_models.tiny` knows."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that differ from the tiny one."""
    multimodal: bool = False
    """Whether the files have a vision tower, and only the text model is trained."""
    noise: float = 0.15
    """Size of what is added to the initial values of matrices."""
    attention: str = "eager"
    """Attention implementation of the reference."""


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0,
         "original_max_position_embeddings": 16, "short_factor": [1.0, 1.1, 1.2, 1.4],
         "long_factor": [1.2, 2.0, 3.0, 5.0]}  # fmt: skip

# The norm after linear attention divides by the size of a head's output, which is nearly zero where
# a query is orthogonal to its key. With the published 1e-6, losses of plain transformers in fp32
# and in fp64 differ by 1.4e-5 after 20 steps.
_SMOOTH = {"rms_norm_eps": 1e-2}

FAMILIES: Mapping[str, Family] = {
    "Llama 2": Family("llama", {"num_key_value_heads": 4}),
    "Llama 3": Family("llama", {"rope_parameters": _LLAMA3}),
    "Qwen 2": Family("qwen2"),
    "Qwen 2.5": Family("qwen2: window", {"tie_word_embeddings": True}),
    "Qwen 3": Family("qwen3"),
    "Qwen 3.5": Family("qwen3_5_text", _SMOOTH),
    "Qwen 3.5 multimodal": Family("qwen3_5", _SMOOTH, multimodal=True),
    "Gemma 2": Family("gemma2"),
    "Gemma 3": Family("gemma3_text"),
    "Gemma 3 multimodal": Family("gemma3", multimodal=True),
    "Mistral": Family("mistral"),
    "Mistral Small 3.1": Family("mistral3", multimodal=True),
    "Phi 3": Family("phi3"),
    "Phi 4 mini": Family("phi3", {"rope_parameters": _LONG, "tie_word_embeddings": True,
                                  "hidden_size": 64, "max_position_embeddings": 64,
                                  "original_max_position_embeddings": 16}),
    "OLMo 2": Family("olmo2"),
    "OLMo 3": Family("olmo3"),
    "Granite": Family("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0,
                                  "residual_multiplier": 0.7, "attention_multiplier": 0.3}),
    "Granite with sinks": Family("granite_swa"),
    "SmolLM 3": Family("smollm3"),
    "GPT-NeoX": Family("gpt_neox"),
    "GPT-2": Family("gpt2"),
    "Falcon 7B": Family("falcon"),
    "Falcon 40B": Family("falcon: new decoder"),
    "Falcon RW": Family("falcon: ALiBi", {"parallel_attn": False, "multi_query": False,
                                          "bias": True, "num_kv_heads": 4},
                        attention="sdpa"),  # its eager attention adds ALiBi twice
    "BLOOM": Family("bloom"),
    "MPT": Family("mpt"),
    "GPT-J": Family("gptj"),
    "OPT": Family("opt"),
    "OPT 350M": Family("opt: projection"),
    "StarCoder 2": Family("starcoder2"),
    "Cohere": Family("cohere", {"logit_scale": 0.5}),
    "Cohere 2": Family("cohere2", {"logit_scale": 0.5}),
    "EXAONE 4": Family("exaone4"),
    "LFM2": Family("lfm2"),
    "NanoChat": Family("nanochat"),
}  # fmt: skip


def save_family(family: Family, folder: Path, *, vocabulary: int) -> Path:
    """Save a model in fp32, with weights for which every part of it matters."""
    if family.kind in CONFIGS:
        return save_multimodal(folder, family.kind, vocabulary=vocabulary)
    config = tiny_config(family.kind)
    text = config.get_text_config()
    for name, value in {**family.changes, "vocab_size": vocabulary}.items():
        setattr(text, name, value)
    torch.manual_seed(1)
    model = _auto_class(family).from_config(config, dtype=torch.float32)
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=drawn)
            parameter.add_(noise * (family.noise if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    return folder


def load_family(family: Family, folder: Path, dtype: torch.dtype) -> Any:
    """Load a model with plain transformers and its own attention."""
    model, report = _auto_class(family).from_pretrained(
        folder, dtype=dtype, attn_implementation=family.attention, output_loading_info=True
    )
    problems = {kind: names for kind, names in report.items() if names}
    assert not problems, problems
    return model


def is_text(name: str) -> bool:
    """Return whether a parameter of a multimodal model belongs to its text model."""
    return "vision_tower" not in name and "visual." not in name and "projector" not in name


def _auto_class(family: Family) -> Any:
    if family.multimodal:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM
