"""The kernel that PyTorch's attention uses on a GPU, for tracing without one.

`scaled_dot_product_attention` chooses its kernel by the device. Fake tensors pretend to be on the
CPU, because torch cannot pretend to have a GPU in a build without CUDA, so the choice is made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.nn import functional

LARGEST_HEAD = 256
"""Largest head size of flash attention."""

ALIGNMENT = 8
"""Flash attention pads head sizes, and memory-efficient attention rows of its mask, to a multiple
of this many elements."""

FP32_ALIGNMENT = 4
"""Memory-efficient attention in fp32 needs head sizes that are multiples of this."""


@contextlib.contextmanager
def attending_as_on_gpu() -> Iterator[None]:
    """Make PyTorch's attention call the operations that it would call on a GPU."""
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    operations: Any = torch.ops.aten
    # Only one operation broadcasts heads. In Falcon, the queries of all heads share one key.
    broadcasts = query.shape[1] != key.shape[1] and not enable_gqa
    size = query.shape[-1]
    kernel = "math" if broadcasts else choose_kernel(query, key, attn_mask)
    scale = size**-0.5 if scale is None else scale
    if enable_gqa and kernel != "flash":
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    output: torch.Tensor
    if kernel == "efficient":
        needs_gradient = torch.is_grad_enabled() and query.requires_grad
        bias = None if attn_mask is None else _bias(attn_mask, query)
        attend = operations._scaled_dot_product_efficient_attention
        output = attend(query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale)[
            0
        ]
    elif kernel == "math":
        added = None if attn_mask is None else _added(attn_mask, query)
        attend = operations._scaled_dot_product_attention_math
        output = attend(query, key, value, added, dropout_p, is_causal, scale=scale)[0]
    else:
        pad = -size % ALIGNMENT
        if pad:
            query, key, value = (functional.pad(t, (0, pad)) for t in (query, key, value))
        attend = operations._scaled_dot_product_flash_attention
        output = attend(query, key, value, dropout_p, is_causal, scale=scale)[0]
        output = output[..., :size] if pad else output
    return output


def choose_kernel(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> Literal["flash", "efficient", "math"]:
    """Return the kernel that PyTorch uses on a GPU."""
    size = query.shape[-1]
    if mask is not None:
        return "efficient"
    if query.dtype == torch.float32:
        # There is no flash attention in fp32, and memory-efficient attention takes no grouped keys.
        grouped = query.shape[1] != key.shape[1]
        return "math" if grouped or size % FP32_ALIGNMENT else "efficient"
    return "flash" if size <= LARGEST_HEAD else "math"


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Convert a mask to a bias that is added to scores, with rows aligned for the kernel."""
    mask = _added(mask, query)
    keys = mask.shape[-1]
    pad = -keys % ALIGNMENT
    if pad:
        mask = functional.pad(mask, (0, pad))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Convert a mask to a bias that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=query.dtype)
    return zeros.masked_fill_(mask.logical_not(), float("-inf"))
