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


def config_of(shape: str, context: int) -> Any:
    """Return the `transformers` configuration of a shape."""
    import transformers

    sizes: dict[str, Any] = dict(zip(_FIELDS, SHAPES[shape], strict=True))
    return transformers.LlamaConfig(**sizes, max_position_embeddings=max(context, 4096))
