"""Create, query and move CPU tensors on chosen NUMA nodes."""

from __future__ import annotations

import math

import torch

from penstock import _native
from penstock.errors import DtypeError, MoveError, SizeError
from penstock.machine.limits import usable_threads
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
from penstock.memory.views import Shape, check_dtype, check_shape, initialize_cuda, tensor_over


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
    """Return an uninitialized CPU tensor whose memory is on `place`.

    The memory is returned to the OS when the last tensor or view of it is gone. Copies and
    pickles of the tensor are ordinary torch tensors.

    Args:
        shape: shape of the tensor.
        dtype: dtype; by default `torch.get_default_dtype()`.
        place: NUMA nodes of the memory; by default the one set by `placing`, or the OS's
            choice.
        pinned: register the memory with CUDA, so that copies run at full speed.
        huge: `"thp"` for transparent huge pages, `"2M"` for reserved ones, None for 4 KiB pages.
        prefault: allocate all pages now instead of on first use.
        requires_grad: record operations on the tensor for autograd.
    """
    dtype = check_dtype(dtype)
    sizes = check_shape(shape)
    options = RegionOptions(pinned=pinned, huge=huge, prefault=prefault)
    initialize_cuda(pinned)
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
    """Return a tensor of zeros. This is as fast as `empty`: new pages are zero already."""
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
    """Return a tensor filled with `fill_value`. Its dtype is inferred as in `torch.full`."""
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
    """Return a placed, contiguous copy of a tensor on any device."""
    if tensor.layout is not torch.strided:
        raise DtypeError(f"only dense tensors can be placed, got layout {tensor.layout}")
    placed = empty(tensor.shape, dtype=tensor.dtype, place=place, pinned=pinned, huge=huge)
    with torch.no_grad():
        placed.copy_(tensor)
    return placed.requires_grad_(tensor.requires_grad)


def where(tensor: torch.Tensor) -> Residency:
    """Ask the OS on which nodes the pages of a CPU tensor are. Any CPU tensor works."""
    return residency(*_span(tensor))


def move(tensor: torch.Tensor, place: Place) -> None:
    """Migrate a CPU tensor's pages. Its address, contents and views do not change.

    Whole pages move, including other data in the first and last page. A pinned tensor is
    unregistered from CUDA and registered again, so no copy to or from it may be in flight.
    """
    check_place(place)
    if place is None:
        raise TypeError("move needs a place, got None")
    address, nbytes = _span(tensor)
    region = _native.Region.at(address)
    if region is not None:
        move_region(region, address - region.address, nbytes, place)
        return
    # Memory of another allocator: move its pages, but leave its policy alone. Pages are distributed
    # in units of 2 MiB, because some of them may be huge pages.
    check_move(address, nbytes, place, System())
    try:
        stuck = _native.migrate_pages(address, nbytes, place.native(), usable_threads(System()))
    except OSError as error:
        raise explain_move(error, nbytes) from None
    if stuck:
        raise MoveError(wanted=nbytes, reason=f"{stuck} pages stayed where they were")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and length from a tensor's first element to its last."""
    if tensor.device.type != "cpu":
        raise TypeError(f"only CPU tensors are on a NUMA node; this tensor is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise SizeError(f"only dense tensors are contiguous in memory; this one is {tensor.layout}")
    if tensor.numel() == 0:
        raise SizeError(f"a tensor of shape {tuple(tensor.shape)} has no memory")
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (extent + 1) * tensor.element_size()
