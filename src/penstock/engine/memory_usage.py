"""What engines really hold outside the device, for whoever asks. Room: move.

Counted where it is taken, from what was got and not from the plan, so that the two can be laid
beside each other. Any thread may ask: it reads a few numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from penstock.memory.arena import Arena
from penstock.storage.store import Store
from penstock.tiers import Tier


class MemoryUsage:
    """One engine's."""

    def __init__(self, where: torch.device) -> None:
        self.gpu = (where.index or 0) if where.type == "cuda" else None
        """Which one its HBM is."""
        self.tiers: Mapping[Tier, int] = {}
        self.pinned = 0
        """Of the host's, what CUDA knows of."""
        _live.append(weakref.ref(self, _live.remove))

    def took_arena(self, arena: Arena, shares: Mapping[Tier, int]) -> None:
        """`shares` says how it is dealt over tiers: all of it is in one, or it is striped."""
        nbytes, dealt = arena.stats.capacity, sum(shares.values())
        self._add({tier: nbytes * share // dealt for tier, share in shares.items()})
        self.pinned += nbytes if arena.pinned else 0

    def took_store(self, store: Store) -> None:
        self._add({Tier.NVME: store.stats.capacity})

    def gave_back(self) -> None:
        """Everything."""
        self.tiers, self.pinned, self.gpu = {}, 0, None

    def _add(self, taken: Mapping[Tier, int]) -> None:
        """A new mapping: somebody may be reading the old one."""
        added = {tier: self.tiers.get(tier, 0) + nbytes for tier, nbytes in taken.items()}
        self.tiers = {**self.tiers, **added}


_live: list[weakref.ref[MemoryUsage]] = []


def memory_usages() -> list[MemoryUsage]:
    """Of all engines of this process that there are."""
    found = (ref() for ref in tuple(_live))
    return [holding for holding in found if holding is not None]
