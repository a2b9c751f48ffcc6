"""Tiny mixture-of-experts models, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip

_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 12,
        "num_experts_per_tok": 2, "head_dim": 8,
    },
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": _LATENT | {
        "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": _LATENT | {
        "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1,
    },
    "glm4_moe": {
        "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "head_dim": 8,
        "n_group": 1, "topk_group": 1,
    },
    "gpt_oss": {
        "intermediate_size": 64, "hidden_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
"""Fields of a config, in addition to `SIZES`."""


def moe_model(family: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    """Build a model with random weights, none of them at the value that its class sets."""
    config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES[family] | fields)
    torch.manual_seed(7)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    return model.eval()


def save_moe(
    family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, *, shard: str = "5GB",
    **fields: Any,
) -> Any:  # fmt: skip
    """Save such a model as transformers does, with one tensor per expert, and return it."""
    model = moe_model(family, dtype, **fields)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
