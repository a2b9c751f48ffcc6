"""Memory and disk space that engines really use outside the device.

Every allocation is counted when it is made, so the numbers do not depend on the plan and can be
compared with it. Any thread may read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from penstock.memory.arena import Arena
from penstock.storage.store import Store
from penstock.tiers import Tier


class MemoryUsage:
    """The memory usage of one engine, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = (device.index or 0) if device.type == "cuda" else None
        """Index of the GPU whose memory is the engine's HBM tier."""
        self.tiers: Mapping[Tier, int] = {}
        """Bytes per tier, HBM excluded."""
        self.pinned = 0
        """Bytes of pinned host memory."""
        _live.append(weakref.ref(self, _live.remove))

    def add_arena(self, arena: Arena, shares: Mapping[Tier, int]) -> None:
        """Count an arena; `shares` gives its proportions by tier, several if it is striped."""
        nbytes, total = arena.stats.capacity, sum(shares.values())
        self._add({tier: nbytes * share // total for tier, share in shares.items()})
        self.pinned += nbytes if arena.pinned else 0

    def add_store(self, store: Store) -> None:
        self._add({Tier.NVME: store.stats.capacity})

    def clear(self) -> None:
        """Count nothing: the engine has released everything."""
        self.tiers, self.pinned, self.gpu = {}, 0, None

    def _add(self, more: Mapping[Tier, int]) -> None:
        # Replace the mapping instead of changing it: another thread may be reading it.
        added = {tier: self.tiers.get(tier, 0) + nbytes for tier, nbytes in more.items()}
        self.tiers = {**self.tiers, **added}


_live: list[weakref.ref[MemoryUsage]] = []


def memory_usages() -> list[MemoryUsage]:
    """Return the memory usage of every engine in this process."""
    usages = (ref() for ref in tuple(_live))
    return [usage for usage in usages if usage is not None]
