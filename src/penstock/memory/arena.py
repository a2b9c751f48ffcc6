"""Arenas: many blocks in one contiguous range of host memory."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.errors import ArenaBusyError, ArenaFullError, SizeError
from penstock.memory.placement import Place
from penstock.memory.region import (
    Huge,
    RegionOptions,
    allocate_region,
    check_nbytes,
    create_memory_file,
    pin_region,
)
from penstock.memory.residency import Residency, residency
from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Default alignment of a block: the widest aligned access of a GPU."""

MAX_ALIGNMENT = _native.UNIT_NBYTES
"""Largest alignment: an arena itself is aligned to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """An arena's memory usage at one moment."""

    capacity: int
    used: int
    """Bytes allocated since the last reset, padding included."""
    padding: int
    """Part of `used` that is lost to alignment."""
    peak: int
    """Highest value that `used` has had."""
    live: int
    """Number of blocks that are still alive."""


class Arena:
    """A contiguous range that is allocated front to back and released as a whole.

    The memory is returned to the OS when the arena and all of its blocks are gone.

    Args:
        nbytes: size in bytes or as text such as `"4GiB"`.
        place: NUMA nodes of the memory; by default the one set by `placing`, or the OS's
            choice.
        pinned: register the memory with CUDA, so that copies run at full speed.
        huge: kind of huge pages, see `RegionOptions`.
        prefault: allocate all pages now.
    """

    def __init__(
        self,
        nbytes: int | str,
        place: Place | None = None,
        pinned: bool = False,
        *,
        huge: Huge = "auto",
        prefault: bool = True,
    ) -> None:
        options = RegionOptions(pinned=pinned, huge=huge, prefault=prefault)
        self._allocate(parse_bytes(nbytes), place, options, None)

    @classmethod
    def shared(cls, nbytes: int, place: Place | None = None, pinned: bool = False) -> Arena:
        """Allocate an arena that other processes can open by its file descriptor `fd`."""
        fd = create_memory_file(nbytes)
        try:
            arena = cls.__new__(cls)
            arena._allocate(nbytes, place, RegionOptions(pinned=pinned), fd)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(arena, os.close, fd)
        return arena

    @classmethod
    def open(cls, fd: int, pinned: bool = False) -> Arena:
        """Open an arena that another process has allocated with `shared`.

        The caller may close `fd` afterwards.
        """
        arena = cls.__new__(cls)
        # The owner has touched all pages already, on the nodes of its choice.
        options = RegionOptions(pinned=pinned, huge="thp", prefault=False)
        arena._allocate(os.fstat(fd).st_size, None, options, fd)
        arena.fd = None
        return arena

    def _allocate(
        self, nbytes: int, place: Place | None, options: RegionOptions, fd: int | None
    ) -> None:
        region = allocate_region(nbytes, place, options, fd=-1 if fd is None else fd)
        self._native = _native.Arena(region)
        self.fd = fd
        """File descriptor of memory that can be shared; None if it is private."""

    def take(self, nbytes: int, *, align: int = ALIGNMENT, name: str = "a block") -> _native.Block:
        """Allocate `nbytes` at a multiple of `align`. The block keeps the arena's memory mapped.

        `name` identifies the block in error messages.
        """
        check_nbytes(name, nbytes)
        if align < 1 or align & (align - 1) or align > MAX_ALIGNMENT:
            raise SizeError(
                f"{name}: align must be a power of two up to {format_bytes(MAX_ALIGNMENT)}, "
                f"got {align}"
            )
        try:
            return self._native.take(nbytes, align)
        except _native.ArenaFull as full:
            wanted, free = full.args
            raise ArenaFullError(
                name=name, wanted=wanted, free=free, capacity=self._native.capacity
            ) from None

    def tensor(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        align: int = ALIGNMENT,
        name: str = "a tensor",
    ) -> torch.Tensor:
        """Allocate an uninitialized tensor."""
        # Imported here: this module must import without torch.
        from penstock.memory.views import check_dtype, check_shape, initialize_cuda, tensor_over

        dtype = check_dtype(dtype)
        sizes = check_shape(shape)
        initialize_cuda(self.pinned)
        block = self.take(math.prod(sizes) * dtype.itemsize, align=align, name=name)
        return tensor_over(block, sizes, dtype)

    def reset(self) -> None:
        """Release all blocks and start from the front. Raises ArenaBusyError if one is alive."""
        try:
            self._native.reset()
        except _native.ArenaBusy as busy:
            raise ArenaBusyError(busy.args[0]) from None

    @property
    def stats(self) -> ArenaStats:
        """Memory usage of the arena."""
        native = self._native
        return ArenaStats(
            capacity=native.capacity,
            used=native.used,
            padding=native.padding,
            peak=native.peak,
            live=native.live,
        )

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._native.region.address

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA, so that copies run at full speed."""
        return self._native.region.pin is _native.Pin.registered

    def pin(self) -> None:
        """Register the memory with CUDA, as `pinned=True` does. It may be in use meanwhile."""
        pin_region(self._native.region)

    def where(self) -> Residency:
        """Count the pages of the whole range per node, used or not."""
        return residency(self.address, self._native.capacity)

    def __repr__(self) -> str:
        s = self.stats
        return f"Arena({format_bytes(s.used)} of {format_bytes(s.capacity)} used, {s.live} live)"
