"""Model sizes that the benchmarks train, with random weights."""

from __future__ import annotations

from typing import Any

_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
           "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "tiny": (1000, 128, 512, 4, 8, 4, True),
    "small": (4096, 512, 2048, 8, 8, 4, True),
    "medium": (32000, 1024, 4096, 16, 16, 4, True),
    "1b": (128256, 2048, 8192, 16, 32, 8, True),
    "3b": (151936, 2048, 11008, 36, 16, 2, True),
    "8b": (128256, 4096, 14336, 32, 32, 8, False),
    "8b-8": (128256, 4096, 14336, 8, 32, 8, False),
    "32b": (152064, 5120, 27648, 64, 40, 8, False),
    "70b": (128256, 8192, 28672, 80, 64, 8, False),
}
"""Llama models with the sizes of Llama-3.2-1B, Qwen2.5-3B (3.086 B parameters), Llama-3.1-8B, 8 of
its 32 layers, Qwen2.5-32B and Llama-3.1-70B, and three smaller ones for rehearsals and quick
measurements."""


_OLMOE_TINY = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN3 = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip
_GPT_OSS_TINY = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
    "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

FAMILY_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-4b": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    }),
    "olmoe": ("Olmoe", {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8,
    }),
    "qwen3-30b-a3b": ("Qwen3Moe", _QWEN3),
    "qwen3-30b-a3b-12": ("Qwen3Moe", _QWEN3 | {"num_hidden_layers": 12}),
    "gpt-oss-20b": ("GptOss", {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }),
    "olmoe-tiny": ("Olmoe", _OLMOE_TINY),
    "qwen3-moe-tiny": ("Qwen3Moe", _OLMOE_TINY | {
        "moe_intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True,
    }),
    "gpt-oss-tiny": ("GptOss", _GPT_OSS_TINY),
}  # fmt: skip
"""Models of other families than Llama by name: the family, and its sizes. They are those of
Qwen3-4B (4.02 B parameters) and of mixtures of experts: OLMoE-1B-7B (6.92 B parameters, 1.28 B of
them active), Qwen3-30B-A3B (30.5 B, 3.3 B active), the same with 12 of its 48 layers, gpt-oss-20b
(20.9 B, 3.6 B active), and tiny ones of each family for rehearsals."""

TINY = {
    "olmoe": "olmoe-tiny",
    "qwen3-30b-a3b": "qwen3-moe-tiny",
    "qwen3-30b-a3b-12": "qwen3-moe-tiny",
    "gpt-oss-20b": "gpt-oss-tiny",
}
"""The shape with which another one is rehearsed, if it is not `tiny`."""

ALL_SHAPES = (*SHAPES, *FAMILY_SHAPES)


def config_of(shape: str, context: int) -> Any:
    """Return the `transformers` configuration of a shape."""
    import transformers

    family, fields = FAMILY_SHAPES.get(shape) or ("Llama", {})
    fields = fields or dict(zip(_FIELDS, SHAPES[shape], strict=True))
    if "num_experts_per_tok" in fields or "num_local_experts" in fields:
        # Experts of a new model are used unevenly; the auxiliary loss is part of the step.
        fields = fields | {"output_router_logits": True}
    make = getattr(transformers, f"{family}Config")
    return make(**fields, max_position_embeddings=max(context, 4096))
