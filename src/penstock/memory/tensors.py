"""Tensors over placed memory. Room: hold. The only file that knows both blocks and torch."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence

import torch

from penstock import _native
from penstock.errors import DtypeError, MoveError, SizeError
from penstock.memory.arena import Arena
from penstock.memory.placement import Place, check_place
from penstock.memory.region import (
    Huge,
    RegionOptions,
    check_move,
    explain_move,
    move_region,
    take_region,
)
from penstock.memory.residency import Residency, residency
from penstock.system import System

Shape = int | Sequence[int]


def empty(
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    place: Place | None = None,
    pinned: bool = False,
    huge: Huge = "auto",
    prefault: bool = True,
    requires_grad: bool = False,
) -> torch.Tensor:
    """A CPU tensor whose memory is on `place`.

    Like `torch.empty`, the contents are not promised. The memory goes back to the kernel when the
    last view of the last tensor over it is gone; copies and pickles are plain torch tensors.
    """
    dtype = _check_dtype(dtype)
    sizes = _check_shape(shape)
    options = RegionOptions(pinned=pinned, huge=huge, prefault=prefault)
    _wake_cuda(pinned)
    region = take_region(math.prod(sizes) * dtype.itemsize, place, options)
    return _over(_native.Block(region), sizes, dtype).requires_grad_(requires_grad)


def zeros(
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    place: Place | None = None,
    pinned: bool = False,
    huge: Huge = "auto",
    prefault: bool = True,
    requires_grad: bool = False,
) -> torch.Tensor:
    """`empty`, all zero. It costs no more: the kernel hands out zeroed pages."""
    return empty(
        shape,
        dtype=dtype,
        place=place,
        pinned=pinned,
        huge=huge,
        prefault=prefault,
        requires_grad=requires_grad,
    )


def full(
    shape: Shape,
    fill_value: float | bool,
    *,
    dtype: torch.dtype | None = None,
    place: Place | None = None,
    pinned: bool = False,
    huge: Huge = "auto",
    prefault: bool = True,
    requires_grad: bool = False,
) -> torch.Tensor:
    """`empty`, every element `fill_value`. The type is inferred from it as `torch.full` does."""
    dtype = dtype or torch.full((), fill_value).dtype
    tensor = empty(shape, dtype=dtype, place=place, pinned=pinned, huge=huge, prefault=prefault)
    return tensor.fill_(fill_value).requires_grad_(requires_grad)


def from_tensor(
    tensor: torch.Tensor,
    *,
    place: Place | None = None,
    pinned: bool = False,
    huge: Huge = "auto",
) -> torch.Tensor:
    """A placed, contiguous copy of any tensor, on whatever device it is."""
    if tensor.layout is not torch.strided:
        raise DtypeError(f"only dense tensors can be placed, got layout {tensor.layout}")
    placed = empty(tensor.shape, dtype=tensor.dtype, place=place, pinned=pinned, huge=huge)
    with torch.no_grad():
        placed.copy_(tensor)
    return placed.requires_grad_(tensor.requires_grad)


def where(tensor: torch.Tensor) -> Residency:
    """Pages per node of a CPU tensor's memory, asked from the kernel; any CPU tensor will do."""
    return residency(*_span(tensor))


def move(tensor: torch.Tensor, place: Place) -> None:
    """Migrate a CPU tensor's pages; address, contents and views stay as they are.

    Whole pages move, so what shares the first and last page moves along. A pinned tensor is let go
    by CUDA and registered again: no copy to or from it may be in flight.
    """
    check_place(place)
    if place is None:
        raise TypeError("move needs a place, got None")
    address, nbytes = _span(tensor)
    region = _native.Region.at(address)
    if region is not None:
        move_region(region, address - region.address, nbytes, place)
        return
    # Another allocator's memory: its pages move, its policy is not ours to change. They are dealt
    # in whole 2 MiB, for there may be huge pages among them.
    check_move(address, nbytes, place, System())
    try:
        stuck = _native.migrate_pages(address, nbytes, place.native(), os.cpu_count() or 1)
    except OSError as failed:
        raise explain_move(failed, nbytes) from None
    if stuck:
        raise MoveError(wanted=nbytes, reason=f"the kernel left {stuck} pages where they were")


def in_arena(
    arena: Arena, shape: Shape, dtype: torch.dtype | None, *, align: int, name: str
) -> torch.Tensor:
    """The next free bytes of an arena as a tensor."""
    dtype = _check_dtype(dtype)
    sizes = _check_shape(shape)
    _wake_cuda(arena.pinned)
    block = arena.take(math.prod(sizes) * dtype.itemsize, align=align, name=name)
    return _over(block, sizes, dtype)


def _wake_cuda(pinned: bool) -> None:
    """Until torch has started CUDA it calls no memory pinned; `pin_memory=True` starts it too."""
    if pinned and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]


def _over(block: _native.Block, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that reads and writes the block in place and keeps it alive."""
    flat = torch.frombuffer(block, dtype=torch.uint8)
    tensor: torch.Tensor = flat.view(dtype).view(sizes)
    return tensor


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to its last, strides and all."""
    if tensor.device.type != "cpu":
        raise TypeError(f"only host memory has a node; this tensor is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise SizeError(f"only dense tensors lie in one range, this one is {tensor.layout}")
    if tensor.numel() == 0:
        raise SizeError(f"a tensor of shape {tuple(tensor.shape)} has no memory to look at")
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * tensor.element_size()


def _check_shape(shape: Shape) -> tuple[int, ...]:
    if isinstance(shape, Sequence):
        sizes = tuple(operator.index(n) for n in shape)
    else:
        sizes = (operator.index(shape),)
    if any(n < 1 for n in sizes):
        raise SizeError(f"every size is 1 or more, got {sizes}: there is nothing to place")
    return sizes


def _check_dtype(dtype: torch.dtype | None) -> torch.dtype:
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
