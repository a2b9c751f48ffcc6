"""Look up a placement by block, and decide which streamed weights are in HBM at each point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.plan.placement import BlockPlacement, Placement
from penstock.roles import STATE, Role
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True)
class PlacementIndex:
    """Answers, by block index, what the schedule must know about a placement."""

    placement: Placement
    """Where everything is stored."""

    owned: tuple[tuple[int, ...], ...]
    """For each block, the blocks that own the weights it computes with."""

    pieces: tuple[int, ...]
    """For each block, the number of pieces its optimizer sweep is divided into."""

    frozen_pieces: tuple[int, ...]
    """For each block, the number of additional pieces of frozen weights."""

    @classmethod
    def of(cls, inventory: Inventory, placement: Placement) -> PlacementIndex:
        """Build the index of a model's placement."""
        owner = {t.name: i for i, b in enumerate(inventory.blocks) for t in b.tensors}
        owned = tuple(
            tuple(sorted({owner[name] for name in b.borrows} | ({i} if b.tensors else set())))
            for i, b in enumerate(inventory.blocks)
        )
        step = placement.piece_elements
        pieces = tuple(len(b.pieces(step)) for b in inventory.blocks)
        frozen = tuple(len(b.pieces(step, trainable=False)) for b in inventory.blocks)
        return cls(placement, owned, pieces, frozen)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.owned)

    def owners(self, block: int) -> tuple[int, ...]:
        """Return the blocks that own the weights this block computes with."""
        return self.owned[block]

    def users(self, block: int) -> tuple[int, ...]:
        """Return the blocks that compute with this block's weights."""
        return tuple(i for i, owners in enumerate(self.owned) if block in owners)

    def is_layer(self, block: int) -> bool:
        """Return whether the block is a layer, not the embedding or the head."""
        return 0 < block < self.count - 1

    def weight_in_hbm(self, block: int) -> bool:
        """Return whether the block's weights are resident in HBM."""
        return self._at(block).all_on(Role.WEIGHT, Tier.HBM)

    def weight_on_nvme(self, block: int) -> bool:
        """Return whether any of the block's weights are stored on NVMe."""
        return self._at(block).touches(Role.WEIGHT, Tier.NVME)

    def adds_to(self, block: int) -> tuple[int, ...]:
        """Return the blocks whose gradients this block's backward adds to.

        That is the block itself and, for a tied head, also the embedding.
        """
        owners = (*self.owned[block], block) if block == self.count - 1 else (block,)
        trained = (o for o in owners if self._at(o).home(Role.GRADIENT) is not None)
        return tuple(sorted(set(trained)))

    def offloads_activation(self, block: int) -> bool:
        """Return whether the block's activation is stored outside HBM."""
        home = self._at(block).home(Role.ACTIVATION)
        return home is not None and not self._at(block).all_on(Role.ACTIVATION, Tier.HBM)

    def gradient_leaves(self, block: int) -> bool:
        """Return whether the block's gradient is stored outside HBM."""
        home = self._at(block).home(Role.GRADIENT)
        return home is not None and not self._at(block).all_on(Role.GRADIENT, Tier.HBM)

    def staged_roles(self, block: int) -> tuple[Role, ...]:
        """Return the roles that a CPU sweep must read from NVMe into host staging."""
        at = self._at(block)
        return tuple(
            role
            for role in (Role.WEIGHT, *STATE, Role.GRADIENT)
            if at.touches(role, Tier.NVME) and at.sweep == "cpu"
        )

    def _at(self, block: int) -> BlockPlacement:
        return self.placement.blocks[block]


@dataclass(frozen=True, slots=True)
class WeightUse:
    """One computation that needs weights."""

    block: int
    """The block that computes."""

    backward: bool
    """Whether the computation includes backward. The head's always does in training."""

    round: int
    """The round."""

    owners: tuple[int, ...]
    """The blocks whose weights it needs. The embedding's backward needs none."""


class WeightWindow:
    """A window of weights in HBM that slides forward through the blocks and back.

    When backward begins, and between rounds, the blocks that are still in a slot are the next ones
    needed, so they stay. Eviction follows Belady's rule, since all uses are known in advance: the
    block whose next use is furthest in the future goes first.
    """

    def __init__(self, index: PlacementIndex, *, backward: bool = True) -> None:
        self.index = index
        rounds = index.placement.rounds if backward else 1
        self.uses = [use for round in range(rounds) for use in _uses(index, round, backward)]
        self._used_at: dict[int, list[int]] = {}
        for k, use in enumerate(self.uses):
            for owner in use.owners:
                self._used_at.setdefault(owner, []).append(k)

    def next_uses(self, at: int) -> list[WeightUse]:
        """Return use `at` and the uses to prefetch for while it computes."""
        return self.uses[at : at + self.index.placement.ahead + 1]

    def evict(self, owner: int, at: int, fetched: Iterable[tuple[int, Role]]) -> list[int]:
        """Return the blocks to drop so that `owner` can be fetched while use `at` computes."""
        needed_soon = {o for use in self.next_uses(at) for o in use.owners}
        layer = self.index.is_layer(owner)
        rivals = [
            b for b, role in fetched if role is Role.WEIGHT and self.index.is_layer(b) == layer
        ]
        idle = sorted(
            (b for b in rivals if b not in needed_soon), key=lambda b: (-self._next(b, at), b)
        )
        if not layer:
            # The embedding and the head are large. They stay only within a round, as a tied
            # embedding does for the head.
            return [b for b in idle if self._round(self._next(b, at)) > self._round(at)]
        return idle[: max(0, len(rivals) + 1 - self.index.placement.slots)]

    def _round(self, at: int) -> int:
        return self.uses[at].round if at < len(self.uses) else self.uses[-1].round + 1

    def _next(self, block: int, at: int) -> int:
        """Return the index of the block's next use, or one past the last use if there is none."""
        return next((k for k in self._used_at.get(block, ()) if k >= at), len(self.uses))


def _uses(index: PlacementIndex, round: int, backward: bool) -> list[WeightUse]:
    """Return the uses of one round: forward, the head and, in training, backward."""
    last = index.count - 1
    forward_uses = [WeightUse(i, False, round, index.owners(i)) for i in range(last)]
    head_use = [WeightUse(last, backward, round, index.owners(last))]
    if not backward:
        return [*forward_uses, *head_use]
    backward_uses = [WeightUse(i, True, round, index.owners(i)) for i in range(last - 1, 0, -1)]
    return [*forward_uses, *head_use, *backward_uses, WeightUse(0, True, round, ())]
