"""A small model of each supported kind, with random weights."""

from __future__ import annotations

from typing import Any

import torch

WINDOW = 8
"""Shorter than the prompts, so that it hides tokens."""

KINDS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW},
    "Gemma3": {"sliding_window": WINDOW},
}


def model(kind: str, seed: int = 0) -> Any:
    """Make a model in float32 on the CPU; with three layers, Gemma has both kinds of attention."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    if kind == "Gemma3":
        shape |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(**shape, **KINDS[kind])
    torch.manual_seed(seed)
    network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    # With weights as initialized, logits are nearly equal; scaled up, rounding does not matter.
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    return network


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return three prompts of 13, 18 and 20 tokens, padded on the left, and their mask."""
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :2] = 0
    return ids * mask, mask
