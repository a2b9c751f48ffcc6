"""Tensors over placed memory. Room: hold. The only file that knows both blocks and torch."""

from __future__ import annotations

import math
import os

import torch

from penstock import _native
from penstock.errors import DtypeError, MoveError, SizeError
from penstock.machine.sysfs import System
from penstock.memory.placement import Place, check_place
from penstock.memory.region import (
    Huge,
    RegionOptions,
    allocate_region,
    check_move,
    explain_move,
    move_region,
)
from penstock.memory.residency import Residency, residency
from penstock.memory.views import Shape, check_dtype, check_shape, tensor_over, wake_cuda


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
    dtype = check_dtype(dtype)
    sizes = check_shape(shape)
    options = RegionOptions(pinned=pinned, huge=huge, prefault=prefault)
    wake_cuda(pinned)
    region = allocate_region(math.prod(sizes) * dtype.itemsize, place, options)
    return tensor_over(_native.Block(region), sizes, dtype).requires_grad_(requires_grad)


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
