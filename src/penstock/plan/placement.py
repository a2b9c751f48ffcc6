"""Placement: which bytes of which block are stored where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import PlanError
from penstock.roles import STATE, WEIGHTS, Role
from penstock.tiers import Tier
from penstock.units import MiB

STRIPE_UNIT = 2 * MiB
"""Stripes consist of whole huge pages. What does not fill a page goes to the last share."""

GPU_PIECE = 1 << 23
"""Number of parameters per piece of an optimizer sweep on the GPU over states in host memory: 112
MiB with fp32 moments. Copies this long reach the rate of the link, and the host has time to issue
them."""

SweepSide = Literal["cpu", "gpu", "none"]

TransportName = Literal["shared", "collective"]
"""How ranks reach each other's data. With `shared`, one host's memory is mapped by all ranks, which
read weights from it and pass gradients through it. With `collective`, each rank reads its own
shards, and collective calls move them between GPUs and machines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A number of bytes in one location."""

    tier: Tier
    """The tier."""

    nbytes: int
    """Number of bytes."""

    node: int | None = None
    """The NUMA node, for DRAM and CXL memory."""

    path: str = ""
    """The directory or device, for NVMe."""

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError("nbytes", f"must be 0 or more, got {self.nbytes}")
        if (self.node is not None) != (self.tier in (Tier.DRAM, Tier.CXL)):
            raise PlanError(
                "node", f"is required for dram and cxl only, got {self.node} for {self.tier}"
            )
        if bool(self.path) != (self.tier is Tier.NVME):
            raise PlanError("path", f'is required for nvme only, got "{self.path}" for {self.tier}')


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where one role of one block is stored, in one location or striped over several."""

    role: Role
    """The role."""

    shares: tuple[Share, ...]
    """The locations, in the order of the bytes."""

    @property
    def nbytes(self) -> int:
        """Total number of bytes."""
        return sum(share.nbytes for share in self.shares)

    def on(self, tier: Tier) -> int:
        """Return the number of bytes in one tier."""
        return sum(share.nbytes for share in self.shares if share.tier is tier)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlacement:
    """Where one block's roles are stored, and which processor updates it."""

    block: str
    """The block's name."""

    homes: tuple[Home, ...]
    """One home for each role that the block has."""

    sweep: SweepSide = "cpu"
    """Which processor runs the block's optimizer sweep. The GPU sweeps blocks in HBM, and may sweep
    blocks in host memory, whose states then pass through HBM in pieces. `none` if the whole block
    is frozen."""

    late_moments: bool = False
    """Whether the sweep before the block's forward updates the weights only. The CPU updates the
    moments before backward replaces the gradient, while host memory and disks are less busy. Until
    then, the memory of the gradient is in use. False in plans of earlier versions."""

    kept: int = 0
    """Number of micro-batches of each round, the first ones, for which everything that the layer's
    forward pass saves stays in HBM until its backward pass. The others are recomputed."""

    attention: int = 0
    """Number of micro-batches of each round, those after the `kept` ones, for which what attention
    returned is saved (`Role.ATTENTION`), so that backward recomputes the layer without it."""

    # Looked up thousands of times for each schedule, so they are computed once.
    _homes: Mapping[Role, Home] = field(init=False, repr=False, compare=False)
    _tiers: Mapping[Role, frozenset[Tier]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        roles = [home.role for home in self.homes]
        if len(set(roles)) < len(roles):
            raise PlanError("homes", f"{self.block} has a role twice: {', '.join(roles)}")
        for name in ("kept", "attention"):
            if getattr(self, name) < 0:
                raise PlanError(name, f"must be 0 or more, got {getattr(self, name)}")
        tiers = {home.role: frozenset(share.tier for share in home.shares) for home in self.homes}
        object.__setattr__(self, "_homes", {home.role: home for home in self.homes})
        object.__setattr__(self, "_tiers", tiers)

    def home(self, role: Role) -> Home | None:
        """Return where a role is stored, or None if the block does not have it."""
        return self._homes.get(role)

    @property
    def is_split(self) -> bool:
        """Whether trained tensors are resident in HBM, and frozen ones are streamed."""
        return Role.FROZEN in self._homes

    @property
    def streamed(self) -> Home | None:
        """Home of the weights that are fetched; of a resident block, that of its weights."""
        return self._homes.get(Role.FROZEN, self._homes.get(Role.WEIGHT))

    @property
    def streams_states(self) -> bool:
        """Whether the GPU sweeps the block, and its states are in host memory."""
        return self.sweep == "gpu" and not self.all_on(Role.GRADIENT, Tier.HBM)

    @property
    def swept_on_gpu(self) -> tuple[Role, ...]:
        """Roles that return to host memory after the GPU has swept a piece of the block."""
        return WEIGHTS if self.late_moments else (Role.WEIGHT, *STATE)

    @property
    def attended(self) -> range:
        """Micro-batches of a round for which the results of attention are saved."""
        return range(self.kept, self.kept + self.attention)

    def all_on(self, role: Role, tier: Tier) -> bool:
        """Return whether the block has the role and stores all of it in the tier."""
        return role in self._tiers and self._tiers[role] <= {tier}

    def touches(self, role: Role, tier: Tier) -> bool:
        """Return whether the block has the role and stores any of it in the tier."""
        return tier in self._tiers.get(role, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Everything that a plan may choose. None of it can change a bit of the result."""

    rounds: int = 1
    """Number of groups into which a step's micro-batches are divided. One group after the other
    runs forward and backward through all blocks."""

    slots: int = 2
    """Number of layers whose streamed weights fit in HBM at the same time."""

    ahead: int = 1
    """Number of blocks to prefetch while one computes."""

    pieces_staged: int = 3
    """Number of pieces in host staging at the same time: one is read, one is swept and one is
    written back."""

    piece_elements: int = 1 << 26
    """Number of parameters per piece of an optimizer sweep over states on NVMe."""

    sweeps_interleaved: bool = False
    """Whether CPU sweeps over states in host memory are divided into pieces of `piece_elements`,
    too, and run between those over states on NVMe. Otherwise such a sweep is one operation, and
    the pieces that were read meanwhile wait for it. False in plans of earlier versions."""

    gpu_piece_elements: int = GPU_PIECE
    """Number of parameters per piece of an optimizer sweep on the GPU over states in host memory.
    As many pieces are in HBM at the same time as `pieces_staged` says."""

    staging_node: int | None = None
    """The DRAM node of the host buffers between NVMe and the rest, as chosen by
    `staging.choose_staging_node`. Absent in plans of earlier versions: see `host_node`."""

    transport: TransportName | None = None
    """How ranks reach each other's data; None for one rank, and in plans of earlier versions, whose
    ranks use collective calls."""

    blocks: tuple[BlockPlacement, ...]
    """The blocks, in the order of forward."""

    def __post_init__(self) -> None:
        positive = ("rounds", "slots", "ahead", "pieces_staged", "piece_elements")
        for name in (*positive, "gpu_piece_elements"):
            if getattr(self, name) < 1:
                raise PlanError(name, f"must be 1 or more, got {getattr(self, name)}")
        if self.slots <= self.ahead:
            raise PlanError(
                "slots", f"must be more than ahead, which is {self.ahead}, got {self.slots}"
            )

    @property
    def host_node(self) -> int | None:
        """The memory node of the host buffers; None if the OS decides.

        A plan of an earlier version, which does not state the node, has its buffers on the lowest
        DRAM node that it uses, or anywhere if it uses none.
        """
        if self.staging_node is not None:
            return self.staging_node
        shares = (share for b in self.blocks for home in b.homes for share in home.shares)
        nodes = (share.node for share in shares if share.tier is Tier.DRAM)
        return min((node for node in nodes if node is not None), default=None)


def stripe(nbytes: int, weights: Iterable[tuple[Share, float]]) -> tuple[Share, ...]:
    """Divide `nbytes` in proportion to the weights.

    All shares but the last are multiples of `STRIPE_UNIT`. The given shares only say where; their
    own sizes are ignored.
    """
    places = [(share, weight) for share, weight in weights if weight > 0]
    assert places or not nbytes, "there are bytes to store but no location to store them in"
    total = sum(weight for _, weight in places)
    shares: list[Share] = []
    left = nbytes
    for i, (share, weight) in enumerate(places):
        exact = nbytes * weight / total
        part = left if i == len(places) - 1 else round(exact / STRIPE_UNIT) * STRIPE_UNIT
        part = min(part, left)
        left -= part
        if part:
            shares.append(Share(tier=share.tier, nbytes=part, node=share.node, path=share.path))
    return tuple(shares)
