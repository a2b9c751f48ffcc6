"""Memory that an operation allocates for itself on a GPU, and frees before it returns.

The shapes of inputs and outputs do not include the temporary buffers of a kernel.
Every operation that has such buffers is listed here, so a change of a kernel has one place to
update. `shapes` are those of the operation's tensor arguments, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.model.attention_launch import attention_workspace_nbytes

Shape = Sequence[int]

FLASH_ROWS = 128
"""Flash attention's backward pads each document's fp32 accumulator to a multiple of this."""

EMBEDDING_UNSORTED = 3072
"""Number of indices up to which the gradient of an embedding is computed without sorting them."""

PROCESSORS = 148
"""Streaming multiprocessors of the largest GPU."""


def operation_workspace(operation: Any, tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an operation allocates for itself, given its tensor arguments."""
    name = getattr(operation, "_opname", None)
    workspace = WORKSPACES.get(f"{operation.namespace}::{name}") if name else None
    return workspace([tuple(t.shape) for t in tensors]) if workspace else 0


def _repeats_bits() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _flash_backward(shapes: Sequence[Shape]) -> int:
    """`grad, query, key, value, ...` of `[rows, heads, tokens, head size]`."""
    _, query, key, *_ = shapes
    rows, heads, tokens, size = query
    padded = -(-tokens // FLASH_ROWS) * FLASH_ROWS
    wide = 32 * -(-size // 32)
    # The fp32 sum of the queries' gradient, and its row sums; for grouped queries, also the keys'
    # and values' gradients of every query head. To add in a fixed order, there are several sums,
    # enough to keep the GPU busy.
    sums = -(-PROCESSORS // (rows * heads)) if _repeats_bits() else 1
    nbytes = 4 * rows * heads * padded * (sums * wide + 1)
    if key[1] != heads:
        nbytes += 2 * 2 * rows * heads * tokens * size
    return nbytes


def _packed_backward(shapes: Sequence[Shape]) -> int:
    """`grad, query, key, value, ...` of `[tokens, heads, head size]`."""
    tokens, heads, _ = shapes[1]
    return attention_workspace_nbytes(tokens=tokens, heads=heads)


def _efficient_backward(shapes: Sequence[Shape]) -> int:
    """`grad, query, key, value, ...` of `[rows, heads, tokens, head size]`."""
    _, query, key, value, *_ = shapes
    # Each gradient is summed in fp32.
    return 4 * (math.prod(query) + math.prod(key) + math.prod(value))


def _embedding_backward(shapes: Sequence[Shape]) -> int:
    """`grad, indices`."""
    gradient, indices = (math.prod(shape) for shape in shapes)
    if indices <= EMBEDDING_UNSORTED:
        return 0
    # The indices are sorted: keys, values and the sort's own copies, int64, and segment offsets.
    # Rows of equal indices are then summed in fp32: at most as many sums as rows.
    return 6 * 8 * indices + 4 * gradient


WORKSPACES: Mapping[str, Callable[[Sequence[Shape]], int]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "penstock::attend_documents_backward": _packed_backward,
    "aten::embedding_dense_backward": _embedding_backward,
}
"""The workspace of each operation that has one, by the operation's full name."""
