"""One range, many blocks. Room: hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import _native
from penstock.errors import ArenaBusyError, ArenaFullError, SizeError
from penstock.memory.placement import Place
from penstock.memory.region import Huge, RegionOptions, allocate_region, check_nbytes
from penstock.memory.residency import Residency, residency
from penstock.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Where a block starts unless told otherwise: a GPU's widest aligned access."""

MAX_ALIGNMENT = _native.UNIT_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """An arena's bytes at one moment."""

    capacity: int
    used: int
    """Handed out since the last reset, padding included."""
    padding: int
    """Of `used`, lost between blocks to alignment."""
    peak: int
    """The most that `used` has ever been."""
    live: int
    """Blocks still alive."""


class Arena:
    """A contiguous range handed out front to back and taken back as a whole.

    Memory goes back to the kernel when the arena and every block of it are gone.
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
        self._native = _native.Arena(allocate_region(parse_bytes(nbytes), place, options))

    def take(self, nbytes: int, *, align: int = ALIGNMENT, name: str = "a block") -> _native.Block:
        """Reserve `nbytes` at a multiple of `align`. The block keeps the arena's memory mapped."""
        check_nbytes(name, nbytes)
        if align < 1 or align & (align - 1) or align > MAX_ALIGNMENT:
            raise SizeError(
                f"{name}: align is a power of two up to {format_bytes(MAX_ALIGNMENT)}, got {align}"
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
        """A tensor over the next free bytes. What it holds is whatever was there before."""
        # Imported here: the core must import without torch.
        from penstock.memory.views import check_dtype, check_shape, tensor_over, wake_cuda

        dtype = check_dtype(dtype)
        sizes = check_shape(shape)
        wake_cuda(self.pinned)
        block = self.take(math.prod(sizes) * dtype.itemsize, align=align, name=name)
        return tensor_over(block, sizes, dtype)

    def reset(self) -> None:
        """Start again from the front. Raises ArenaBusyError while a block is alive."""
        try:
            self._native.reset()
        except _native.ArenaBusy as busy:
            raise ArenaBusyError(busy.args[0]) from None

    @property
    def stats(self) -> ArenaStats:
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
        return self._native.region.address

    @property
    def pinned(self) -> bool:
        """True when CUDA copies from it at full speed."""
        return self._native.region.pin is _native.Pin.registered

    def where(self) -> Residency:
        """Pages of the whole range, used or not, per node."""
        return residency(self.address, self._native.capacity)

    def __repr__(self) -> str:
        s = self.stats
        return f"Arena({format_bytes(s.used)} of {format_bytes(s.capacity)} used, {s.live} live)"
