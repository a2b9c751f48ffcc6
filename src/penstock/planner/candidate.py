"""What the search moves: a location for each group of roles of each block. Room: decide."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from penstock.roles import STATE, Role
from penstock.tiers import Tier


class Location(StrEnum):
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


class BlockLocations(NamedTuple):
    """One block. None where it has no such role."""

    weight: Location | None
    """Compute weights."""

    state: Location | None
    """Master and moments, which the sweep reads and writes together."""

    gradient: Location | None
    """Gradient."""

    input: Location | None
    """The block's input."""

    @property
    def resident(self) -> bool:
        """All of it in HBM: nothing to fetch, and the GPU sweeps it."""
        return self.weight is Location.HBM


GROUPS: dict[str, tuple[Role, ...]] = {
    "weight": (Role.WEIGHT,),
    "state": STATE,
    "gradient": (Role.GRADIENT,),
    "input": (Role.INPUT,),
}
"""Roles that move together."""

TIERS: dict[Location, tuple[Tier, ...]] = {
    Location.HBM: (Tier.HBM,),
    Location.DRAM: (Tier.DRAM,),
    Location.MIX: (Tier.DRAM, Tier.CXL),
    Location.CXL: (Tier.CXL,),
    Location.NVME: (Tier.NVME,),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate."""

    locations: tuple[BlockLocations, ...]
    """By block."""

    rounds: int = 1
    """See Placement."""

    slots: int = 2
    """See Placement."""

    ahead: int = 1
    """See Placement."""

    def moved(self, changes: dict[int, BlockLocations]) -> Candidate:
        locations = tuple(changes.get(i, location) for i, location in enumerate(self.locations))
        return Candidate(locations, self.rounds, self.slots, self.ahead)
