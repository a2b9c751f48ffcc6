"""Tiny models with adapters of PEFT."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.support import engines

FUSED = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj"], "gpt_neox": ["query_key_value"]}
"""Target modules of families with one matrix for queries, keys and values."""


def lora(**fields: Any) -> LoraConfig:
    """Return the config of an adapter of rank 4 on all linear layers."""
    return LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | fields))


def adapted(
    family: str, config: Any = None, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Return a PEFT model whose adapters are not zero, so that every gradient shows.

    `changes` are those of the model's config.
    """
    model = engines.plain_model(engines.tiny_config(family, **changes), dtype)
    torch.manual_seed(3)
    found: Any = get_peft_model(model, copy.deepcopy(config or lora()))
    drawn = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=drawn))
    return found


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a PEFT model that are trained."""
    named = model.get_base_model().named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}
