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
    "32b": (152064, 5120, 27648, 64, 40, 8, False),
    "70b": (128256, 8192, 28672, 80, 64, 8, False),
}
"""Llama models with the sizes of Llama-3.2-1B, Qwen2.5-3B (3.086 B parameters), Llama-3.1-8B,
Qwen2.5-32B and Llama-3.1-70B, and three smaller ones for rehearsals and quick measurements."""


EXPERT_SHAPES: dict[str, dict[str, Any]] = {
    "olmoe": {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8,
    },
    "olmoe-tiny": {
        "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""Mixtures of experts with the sizes of OLMoE-1B-7B (6.92 B parameters, 1.28 B of them active), and
a tiny one for rehearsals."""

ALL_SHAPES = (*SHAPES, *EXPERT_SHAPES)


def config_of(shape: str, context: int) -> Any:
    """Return the `transformers` configuration of a shape."""
    import transformers

    if shape in EXPERT_SHAPES:
        # Experts of a new model are used unevenly; the auxiliary loss is part of the step.
        return transformers.OlmoeConfig(
            **EXPERT_SHAPES[shape], max_position_embeddings=max(context, 4096),
            output_router_logits=True,
        )  # fmt: skip
    sizes: dict[str, Any] = dict(zip(_FIELDS, SHAPES[shape], strict=True))
    return transformers.LlamaConfig(**sizes, max_position_embeddings=max(context, 4096))
