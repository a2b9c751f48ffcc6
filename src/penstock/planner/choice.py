"""What the search moves: a spot for each group of roles of each block. Room: decide."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.roles import STATE, Role
from penstock.tiers import Tier


class Spot(StrEnum):
    """Where a group may rest."""

    HBM = "hbm"
    """On the GPU."""

    DRAM = "dram"
    """Over the nodes with CPUs."""

    MIX = "mix"
    """Over DRAM and CXL by the sweep's rate, so that both finish together. For states only."""

    CXL = "cxl"
    """Over the cards, by measured bandwidth."""

    NVME = "nvme"
    """Over the paths, by measured bandwidth."""


class BlockSpots(NamedTuple):
    """One block. None where it has no such role."""

    weight: Spot | None
    """Compute weights."""

    state: Spot | None
    """Master and moments, which the sweep reads and writes together."""

    gradient: Spot | None
    """Gradient."""

    input: Spot | None
    """The block's input."""

    @property
    def resident(self) -> bool:
        """All of it in HBM: nothing to fetch, and the GPU sweeps it."""
        return self.weight is Spot.HBM


GROUPS: dict[str, tuple[Role, ...]] = {
    "weight": (Role.WEIGHT,),
    "state": STATE,
    "gradient": (Role.GRADIENT,),
    "input": (Role.INPUT,),
}
"""Roles that move together."""

TIERS: dict[Spot, tuple[Tier, ...]] = {
    Spot.HBM: (Tier.HBM,),
    Spot.DRAM: (Tier.DRAM,),
    Spot.MIX: (Tier.DRAM, Tier.CXL),
    Spot.CXL: (Tier.CXL,),
    Spot.NVME: (Tier.NVME,),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate."""

    spots: tuple[BlockSpots, ...]
    """By block."""

    rounds: int = 1
    """See Placement."""

    slots: int = 2
    """See Placement."""

    ahead: int = 1
    """See Placement."""

    def moved(self, changes: dict[int, BlockSpots]) -> Choice:
        spots = tuple(changes.get(i, spot) for i, spot in enumerate(self.spots))
        return Choice(spots, self.rounds, self.slots, self.ahead)
