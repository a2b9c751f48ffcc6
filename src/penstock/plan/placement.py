"""Homes: which bytes of which block rest where. Room: decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.errors import PlanError
from penstock.roles import Role
from penstock.tiers import Tier
from penstock.units import MiB

STRIPE_UNIT = 2 * MiB
"""Stripes are whole huge pages; what does not fill one goes to the last share."""

SweepSide = Literal["cpu", "gpu", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Bytes in one place."""

    tier: Tier
    """The kind of place."""

    nbytes: int
    """How many."""

    node: int | None = None
    """The memory node, for DRAM and CXL."""

    path: str = ""
    """The directory or device, for NVMe."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError("nbytes", f"must be 0 or more, got {self.nbytes}")
        if (self.node is not None) != (self.tier in (Tier.DRAM, Tier.CXL)):
            raise PlanError("node", f"belongs to dram and cxl, and {self.tier} has {self.node}")
        if bool(self.path) != (self.tier is Tier.NVME):
            raise PlanError("path", f'belongs to nvme, and {self.tier} has "{self.path}"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where one role of one block rests, whole or striped."""

    role: Role
    """What rests there."""

    shares: tuple[Share, ...]
    """The places, in the order of the bytes."""

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.shares)

    def on(self, tier: Tier) -> int:
        """Bytes of it in one tier."""
        return sum(share.nbytes for share in self.shares if share.tier is tier)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlacement:
    """Where one block's roles rest, and who sweeps it."""

    block: str
    """The block's name."""

    homes: tuple[Home, ...]
    """One per role that it has."""

    sweep: SweepSide = "cpu"
    """Who updates it: the GPU if its states rest in HBM. `none` if all of it is frozen."""

    def __post_init__(self) -> None:
        roles = [home.role for home in self.homes]
        if len(set(roles)) < len(roles):
            raise PlanError("homes", f"{self.block} has a role twice: {', '.join(roles)}")

    def home(self, role: Role) -> Home | None:
        for home in self.homes:
            if home.role is role:
                return home
        return None

    def all_on(self, role: Role, tier: Tier) -> bool:
        """It has that role, and all of it rests in that tier."""
        home = self.home(role)
        return home is not None and all(share.tier is tier for share in home.shares)

    def touches(self, role: Role, tier: Tier) -> bool:
        home = self.home(role)
        return home is not None and any(share.tier is tier for share in home.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What a plan may choose: none of it can change a bit of the result."""

    rounds: int = 1
    """Groups of micro-batches that pass all blocks one after the other."""

    slots: int = 2
    """Layers whose streamed weights HBM holds at once."""

    ahead: int = 1
    """Blocks fetched while one computes."""

    pieces_staged: int = 3
    """Pieces of a sweep in host staging at once: one read, one swept, one written back."""

    piece_elements: int = 1 << 26
    """Parameters that a sweep over states on NVMe takes at a time."""

    blocks: tuple[BlockPlacement, ...]
    """In the order of forward."""

    def __post_init__(self) -> None:
        for name in ("rounds", "slots", "ahead", "pieces_staged", "piece_elements"):
            if getattr(self, name) < 1:
                raise PlanError(name, f"must be 1 or more, got {getattr(self, name)}")
        if self.slots <= self.ahead:
            raise PlanError(
                "slots", f"must be more than ahead, which is {self.ahead}, got {self.slots}"
            )


def stripe(nbytes: int, weights: Iterable[tuple[Share, float]]) -> tuple[Share, ...]:
    """Cut `nbytes` in proportion to the weights, in whole units but for the last share.

    The shares given say where; their own bytes do not matter.
    """
    places = [(share, weight) for share, weight in weights if weight > 0]
    assert places or not nbytes, "bytes with no place to go"
    total = sum(weight for _, weight in places)
    made: list[Share] = []
    left = nbytes
    for i, (share, weight) in enumerate(places):
        exact = nbytes * weight / total
        part = left if i == len(places) - 1 else round(exact / STRIPE_UNIT) * STRIPE_UNIT
        part = min(part, left)
        left -= part
        if part:
            made.append(Share(tier=share.tier, nbytes=part, node=share.node, path=share.path))
    return tuple(made)
