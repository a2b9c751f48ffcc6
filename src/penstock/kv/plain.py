"""Attention of one row by torch's own operations. Room: hold."""

from __future__ import annotations

import torch


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    *,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    found = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2)


def capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """One row with capped scores, for which there is no fused kernel. Heads that share keys are
    computed as more queries of one head, so that keys need not be repeated."""
    _, heads, new, head = query.shape
    shared = key.shape[1]
    grouped = query[0].reshape(shared, heads // shared * new, head)
    scale = scaling if scaling is not None else head**-0.5
    scores = torch.bmm(grouped, key[0].transpose(1, 2)) * scale
    scores = torch.tanh(scores / cap) * cap
    scores = scores.view(shared, heads // shared, new, -1).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    found = torch.bmm(weights.view(shared, heads // shared * new, -1), value[0])
    return found.view(1, heads, new, head).transpose(1, 2)
