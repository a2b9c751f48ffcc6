"""Tensors over blocks of host memory: the one file that knows both blocks and torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from penstock import _native
from penstock.errors import DtypeError, SizeError

Shape = int | Sequence[int]


def wake_cuda(pinned: bool) -> None:
    """Until torch has started CUDA it calls no memory pinned; `pin_memory=True` starts it too."""
    if pinned and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]


def tensor_over(block: _native.Block, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that reads and writes the block in place and keeps it alive."""
    flat = torch.frombuffer(block, dtype=torch.uint8)
    tensor: torch.Tensor = flat.view(dtype).view(sizes)
    return tensor


def check_shape(shape: Shape) -> tuple[int, ...]:
    if isinstance(shape, Sequence):
        sizes = tuple(operator.index(n) for n in shape)
    else:
        sizes = (operator.index(shape),)
    if any(n < 1 for n in sizes):
        raise SizeError(f"every size is 1 or more, got {sizes}: there is nothing to place")
    return sizes


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"dtype is a torch.dtype, got {dtype!r}")
    # A quantized type needs a scale beside its bytes: torch makes the view and fails at first use.
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        raise DtypeError(
            f"torch cannot use plain memory as {dtype}; place int8 and view it yourself"
        )
    try:
        torch.empty(0, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError) as failed:
        raise DtypeError(f"torch cannot view plain memory as {dtype}: {failed}") from None
    return dtype
