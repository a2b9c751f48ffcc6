"""Candidates: what the search varies, a location for each group of roles of each block."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from penstock.roles import STATE, Role
from penstock.tiers import Tier


class Location(StrEnum):
    """Where a group of roles may be stored: a tier, or a mix of tiers."""

    HBM = "hbm"
    """In the GPU's memory."""

    DRAM = "dram"
    """Striped over the nodes with CPUs."""

    MIX = "mix"
    """Striped over DRAM and CXL in proportion to their sweep rates, so that the optimizer sweep
    finishes on both at the same time. For optimizer states only."""

    CXL = "cxl"
    """Striped over the CXL cards, in proportion to their measured bandwidth."""

    NVME = "nvme"
    """Striped over the drives that the plan uses, in proportion to their speeds where their budgets
    allow it."""


class BlockLocations(NamedTuple):
    """Where one block's groups are stored. None for a group that the block does not have."""

    weight: Location | None
    """Location of the weights."""

    state: Location | None
    """Location of the master weights and moments, which the optimizer sweep uses together."""

    gradient: Location | None
    """Location of the gradient."""

    activation: Location | None
    """Location of the activation, the saved block input."""

    frozen: Location | None = None
    """Location of the frozen weights, if all that is trained is in HBM and they are not. Otherwise
    None, and they are part of `weight`."""

    @property
    def resident(self) -> bool:
        """Whether the whole block is in HBM: nothing is fetched, and the GPU sweeps it."""
        return self.weight is Location.HBM and self.frozen is None

    @property
    def is_split(self) -> bool:
        """Whether trained tensors are in HBM, and frozen ones are streamed."""
        return self.frozen is not None

    @property
    def trained_in_host_memory(self) -> bool:
        """Whether all that a sweep reads and writes is in DRAM and CXL memory."""
        host = (Location.DRAM, Location.CXL, Location.MIX)
        return all(each in host for each in (self.weight, self.state, self.gradient))


GROUPS: dict[str, tuple[Role, ...]] = {
    "weight": (Role.WEIGHT,),
    "state": STATE,
    "gradient": (Role.GRADIENT,),
    "activation": (Role.ACTIVATION,),
    "frozen": (Role.FROZEN,),
}
"""Roles that are stored in the same location."""

TIERS: dict[Location, tuple[Tier, ...]] = {
    Location.HBM: (Tier.HBM,),
    Location.DRAM: (Tier.DRAM,),
    Location.MIX: (Tier.DRAM, Tier.CXL),
    Location.CXL: (Tier.CXL,),
    Location.NVME: (Tier.NVME,),
}
"""The tiers of each location."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate of the search."""

    locations: tuple[BlockLocations, ...]
    """The locations of each block."""

    rounds: int = 1
    """See `Placement.rounds`."""

    slots: int = 2
    """See `Placement.slots`."""

    ahead: int = 1
    """See `Placement.ahead`."""

    kept: tuple[int, ...] = ()
    """See `BlockPlacement.kept`, for each block; empty if nothing is kept. The activation of a
    block that keeps something is in HBM, wherever its locations say."""

    gpu_swept: frozenset[int] = frozenset()
    """Blocks in host memory whose states pass through HBM, where the GPU sweeps them."""

    attention: tuple[Location | None, ...] = ()
    """For each block, where the results of its attention are saved, for all forward passes that are
    not kept; None if they are computed again. Empty if nothing is saved."""

    interleaved: bool = False
    """See `Placement.sweeps_interleaved`."""

    late: bool = False
    """Whether the moments of all blocks in host memory are updated in backward: see
    `BlockPlacement.late_moments`."""

    late_on_nvme: frozenset[int] = frozenset()
    """Blocks with moments on NVMe that are updated in backward, too."""

    # Candidates are keys of several caches, and the locations of a large model take long to hash.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        value = hash(
            (
                *(self.locations, self.rounds, self.slots, self.ahead, self.kept),
                *(self.gpu_swept, self.attention, self.interleaved, self.late),
                self.late_on_nvme,
            )
        )
        object.__setattr__(self, "_hash", value)

    def __hash__(self) -> int:
        return self._hash

    def has_late_moments(self, block: int) -> bool:
        """Return whether the moments of a block are updated in backward."""
        in_host_memory = self.late and self.locations[block].trained_in_host_memory
        return block in self.late_on_nvme or in_host_memory

    def moved(self, changes: dict[int, BlockLocations]) -> Candidate:
        """Return a copy with other locations for some blocks."""
        locations = tuple(changes.get(i, each) for i, each in enumerate(self.locations))
        return replace(self, locations=locations)

    def kept_of(self, block: int) -> int:
        """Return for how many micro-batches of a round a block keeps what its forward saves."""
        return self.kept[block] if self.kept else 0

    def attention_of(self, block: int) -> Location | None:
        """Return where the results of a block's attention are saved, or None."""
        return self.attention[block] if self.attention else None

    @property
    def placed(self) -> tuple[BlockLocations, ...]:
        """The locations, with the activations of blocks that keep something in HBM."""
        if not self.kept:
            return self.locations
        return tuple(
            each._replace(activation=Location.HBM) if kept else each
            for each, kept in zip(self.locations, self.kept, strict=True)
        )
