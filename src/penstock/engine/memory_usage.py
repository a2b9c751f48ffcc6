"""What engines really allocate, measured without the plan so that it can be compared with the plan.

This is the one source for `Engine.tiers()`, the progress of `penstock train` and the samples of a
recording. Arenas and stores are counted when they are allocated, GPU memory by torch's allocator
and the driver. Any thread may read the numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.device import Device, DeviceMemory
from penstock.memory.arena import Arena
from penstock.memory.residency import residency
from penstock.storage.store import Store
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes of one tier that an engine has allocated."""

    used: int
    """Bytes allocated now."""
    peak: int
    """Most bytes allocated at the same time since the engine was built."""


class MemoryUsage:
    """The memory usage of one engine, in bytes.

    `nbytes_outside_torch` is the memory of this process on the GPU that torch did not allocate,
    until the driver has been asked for it, and where the driver does not report it.
    """

    def __init__(self, device: Device, nbytes_outside_torch: int = 0) -> None:
        self._device = device
        torch_device = device.torch_device
        self.gpu = (torch_device.index or 0) if torch_device.type == "cuda" else None
        """Index of the GPU whose memory is the engine's HBM tier; None if the CPU computes."""
        self.tiers: Mapping[Tier, int] = {}
        """Bytes per tier in arenas and stores: every tier except HBM."""
        self.pinned = 0
        """Bytes of pinned host memory."""
        self.nbytes_outside_torch = nbytes_outside_torch
        self._arenas: list[tuple[int, int]] = []  # address and size
        self._peaks: dict[Tier, int] = {}
        self._open = True
        device.reset_peak()
        _live.append(weakref.ref(self, _live.remove))

    def add_arena(self, arena: Arena, shares: Mapping[Tier, int], *, pinned: bool = False) -> None:
        """Count an arena; `shares` gives its proportions by tier, several if it is striped.

        `pinned` says that the arena will be pinned, if it is not yet.
        """
        nbytes, total = arena.stats.capacity, sum(shares.values())
        self._add({tier: nbytes * share // total for tier, share in shares.items()})
        self._arenas.append((arena.address, nbytes))
        self.pinned += nbytes if pinned or arena.pinned else 0

    def add_store(self, store: Store) -> None:
        """Count the disk space that a store has allocated for data."""
        self._add({Tier.NVME: store.stats.capacity})

    def device_memory(self) -> DeviceMemory:
        """Return the device memory that torch has allocated in this process."""
        return self._device.memory()

    def ask_driver(self) -> None:
        """Update `nbytes_outside_torch`. Takes milliseconds on a GPU."""
        found = self._device.nbytes_outside_torch() if self._open else None
        if found is not None:
            self.nbytes_outside_torch = found

    def by_tier(self) -> dict[Tier, TierUsage]:
        """Return what is allocated in every tier.

        For HBM on a GPU, that is all memory that other programs cannot have because of this
        process: what torch's allocator holds, in use or not, and what is outside torch.
        """
        found = {
            tier: TierUsage(self.tiers.get(tier, 0), self._peaks.get(tier, 0)) for tier in Tier
        }
        if self._open:
            memory, others = self._device.memory(), self.nbytes_outside_torch
            found[Tier.HBM] = TierUsage(memory.reserved + others, memory.peak + others)
        return found

    def resident_nbytes(self) -> int:
        """Return how much of the arenas is in memory, as the OS counts pages.

        The OS looks at every page, which takes seconds for 100 GiB.
        """
        pages = [residency(address, nbytes) for address, nbytes in self._arenas]
        return sum(sum(each.nbytes.values()) for each in pages)

    def clear(self) -> None:
        """Count nothing: the engine has released everything."""
        self.tiers, self.pinned, self.gpu, self._open = {}, 0, None, False
        self._arenas.clear()

    def _add(self, more: Mapping[Tier, int]) -> None:
        # Replace the mapping instead of changing it: another thread may be reading it.
        added = {tier: self.tiers.get(tier, 0) + nbytes for tier, nbytes in more.items()}
        self.tiers = {**self.tiers, **added}
        for tier, nbytes in added.items():
            self._peaks[tier] = max(nbytes, self._peaks.get(tier, 0))


_live: list[weakref.ref[MemoryUsage]] = []


def memory_usages() -> list[MemoryUsage]:
    """Return the memory usage of every engine in this process."""
    usages = (ref() for ref in tuple(_live))
    return [usage for usage in usages if usage is not None]
