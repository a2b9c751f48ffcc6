"""What the schedule must know of a placement: who streams, who stays. Room: decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.model.inventory import Inventory
from penstock.plan.placement import BlockPlacement, Placement
from penstock.roles import STATE, Role
from penstock.tiers import Tier


@dataclass(frozen=True, slots=True)
class PlacementIndex:
    """Answers by block number."""

    placement: Placement
    """Where everything rests."""

    owned: tuple[tuple[int, ...], ...]
    """Per block, the blocks that own the weights it computes with."""

    pieces: tuple[int, ...]
    """Per block, how many pieces its sweep is cut into."""

    frozen_pieces: tuple[int, ...]
    """Per block, how many more there are of weights that are not trained."""

    @classmethod
    def of(cls, inventory: Inventory, placement: Placement) -> PlacementIndex:
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
        return len(self.owned)

    def owners(self, block: int) -> tuple[int, ...]:
        return self.owned[block]

    def users(self, block: int) -> tuple[int, ...]:
        return tuple(i for i, owners in enumerate(self.owned) if block in owners)

    def is_layer(self, block: int) -> bool:
        return 0 < block < self.count - 1

    def weight_in_hbm(self, block: int) -> bool:
        return self._at(block).all_on(Role.WEIGHT, Tier.HBM)

    def weight_on_nvme(self, block: int) -> bool:
        return self._at(block).touches(Role.WEIGHT, Tier.NVME)

    def adds_to(self, block: int) -> tuple[int, ...]:
        """Blocks whose gradients its backward adds to: its own, and that of a tied embedding."""
        owners = (*self.owned[block], block) if block == self.count - 1 else (block,)
        trained = (o for o in owners if self._at(o).home(Role.GRADIENT) is not None)
        return tuple(sorted(set(trained)))

    def offloads_input(self, block: int) -> bool:
        home = self._at(block).home(Role.INPUT)
        return home is not None and not self._at(block).all_on(Role.INPUT, Tier.HBM)

    def gradient_leaves(self, block: int) -> bool:
        home = self._at(block).home(Role.GRADIENT)
        return home is not None and not self._at(block).all_on(Role.GRADIENT, Tier.HBM)

    def staged_roles(self, block: int) -> tuple[Role, ...]:
        """What the sweep must have in host staging because it rests on NVMe."""
        at = self._at(block)
        return tuple(
            role
            for role in (Role.WEIGHT, *STATE, Role.GRADIENT)
            if at.touches(role, Tier.NVME) and at.sweep == "cpu"
        )

    def _at(self, block: int) -> BlockPlacement:
        return self.placement.blocks[block]


@dataclass(frozen=True, slots=True)
class Use:
    """One computation that needs weights."""

    block: int
    """The block computed."""

    backward: bool
    """Whether it differentiates: the head does so at the turn."""

    round: int
    """In which round."""

    owners: tuple[int, ...]
    """Whose weights it needs. The embedding's backward needs none."""


class WeightWindow:
    """Which weights are in HBM when: a window that slides along the uses, forth and back.

    Near the turn, and between rounds, the blocks still in a slot are the next ones needed, so they
    are kept: what is needed furthest in the future goes first.
    """

    def __init__(self, facts: PlacementIndex, *, backward: bool = True) -> None:
        self.facts = facts
        rounds = facts.placement.rounds if backward else 1
        self.uses = [use for round in range(rounds) for use in _uses(facts, round, backward)]
        self._needed: dict[int, list[int]] = {}
        for k, use in enumerate(self.uses):
            for owner in use.owners:
                self._needed.setdefault(owner, []).append(k)

    def next_uses(self, at: int) -> list[Use]:
        return self.uses[at : at + self.facts.placement.ahead + 1]

    def evict(self, owner: int, at: int, fetched: Iterable[tuple[int, Role]]) -> list[int]:
        """The blocks to drop so that `owner` can come in while use `at` is computed."""
        soon = {o for use in self.next_uses(at) for o in use.owners}
        layer = self.facts.is_layer(owner)
        rivals = [
            b for b, role in fetched if role is Role.WEIGHT and self.facts.is_layer(b) == layer
        ]
        idle = sorted((b for b in rivals if b not in soon), key=lambda b: (-self._next(b, at), b))
        if not layer:
            # They are large: kept within a round, as a tied embedding is for the head, not beyond.
            return [b for b in idle if self._round(self._next(b, at)) > self._round(at)]
        return idle[: max(0, len(rivals) + 1 - self.facts.placement.slots)]

    def _round(self, at: int) -> int:
        return self.uses[at].round if at < len(self.uses) else self.uses[-1].round + 1

    def _next(self, block: int, at: int) -> int:
        return next((k for k in self._needed.get(block, ()) if k >= at), len(self.uses))


def _uses(facts: PlacementIndex, round: int, backward: bool) -> list[Use]:
    last = facts.count - 1
    forth = [Use(i, False, round, facts.owners(i)) for i in range(last)]
    turn = [Use(last, backward, round, facts.owners(last))]
    if not backward:
        return [*forth, *turn]
    back = [Use(i, True, round, facts.owners(i)) for i in range(last - 1, 0, -1)]
    return [*forth, *turn, *back, Use(0, True, round, ())]
