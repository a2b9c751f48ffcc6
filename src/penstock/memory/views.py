"""Views of host memory blocks as torch tensors.

This module is separate from `tensors` so that `arena` can import it inside a function: the arena
itself must import without torch, and `tensors` depends on the same modules as the arena.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from penstock import _native
from penstock.errors import DtypeError, SizeError

Shape = int | Sequence[int]


def initialize_cuda(pinned: bool) -> None:
    """Initialize CUDA in torch if memory is to be pinned.

    Until then torch reports no memory as pinned. `torch.empty(pin_memory=True)` does the same.
    """
    if pinned and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]


def tensor_over(block: _native.Block, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that uses the block's memory in place and keeps the block alive."""
    flat = torch.frombuffer(block, dtype=torch.uint8)
    tensor: torch.Tensor = flat.view(dtype).view(sizes)
    return tensor


def check_shape(shape: Shape) -> tuple[int, ...]:
    """Return the shape as a tuple. Raises SizeError if a dimension is below 1."""
    if isinstance(shape, Sequence):
        sizes = tuple(operator.index(n) for n in shape)
    else:
        sizes = (operator.index(shape),)
    if any(n < 1 for n in sizes):
        raise SizeError(
            f"every dimension must be 1 or more, got {sizes}: there is nothing to place"
        )
    return sizes


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype, or torch's default. Raises DtypeError if memory cannot be viewed as it."""
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    # A quantized dtype needs a scale in addition to its bytes. torch creates such a view without
    # an error and fails when it is first used.
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        raise DtypeError(
            f"torch cannot use plain memory as {dtype}; place int8 and view it yourself"
        )
    try:
        torch.empty(0, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError) as error:
        raise DtypeError(f"torch cannot view plain memory as {dtype}: {error}") from None
    return dtype
