"""Look up a placement by block, and decide which streamed weights are in HBM at each point."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

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

    owned_in_backward: tuple[tuple[int, ...], ...]
    """For each block, the blocks that own the weights its backward computes with."""

    pieces: tuple[int, ...]
    """For each block, the number of pieces its optimizer sweep is divided into."""

    frozen_pieces: tuple[int, ...]
    """For each block, the number of additional pieces of frozen weights."""

    ranks: int
    """Number of ranks that share the blocks."""

    whole_tensors: bool
    """Whether the optimizer updates tensors as a whole, on the device."""

    # The schedule asks these many times for each block.
    _users: tuple[tuple[int, ...], ...]
    _split: tuple[bool, ...]
    _weight_in_hbm: tuple[bool, ...]
    _weight_on_nvme: tuple[bool, ...]
    _kept: tuple[bool, ...]
    _offloads_activation: tuple[bool, ...]
    _offloads_attention: tuple[bool, ...]
    _gradient_leaves: tuple[bool, ...]

    @classmethod
    def of(cls, inventory: Inventory, placement: Placement) -> PlacementIndex:
        """Build the index of a model's placement."""
        owned = inventory.weight_owners
        step, blocks = placement.piece_elements, placement.blocks
        pieces = tuple(
            len(b.pieces(placement.gpu_piece_elements if at.streams_states else step))
            for b, at in zip(inventory.blocks, blocks, strict=True)
        )
        frozen = tuple(len(b.pieces(step, trainable=False)) for b in inventory.blocks)
        weight, hbm = Role.WEIGHT, Tier.HBM
        return cls(
            placement, owned, inventory.backward_owners, pieces, frozen, inventory.shards,
            any(block.second is not None for block in inventory.blocks),
            _users(owned),
            tuple(at.is_split for at in blocks),
            tuple(at.all_on(weight, hbm) and not at.is_split for at in blocks),
            tuple(
                at.touches(Role.FROZEN if at.is_split else weight, Tier.NVME) for at in blocks
            ),
            tuple(at.kept > 0 for at in blocks),
            *(
                tuple(at.home(role) is not None and not at.all_on(role, hbm) for at in blocks)
                for role in (Role.ACTIVATION, Role.ATTENTION, Role.GRADIENT)
            ),
        )  # fmt: skip

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.owned)

    def owners(self, block: int) -> tuple[int, ...]:
        """Return the blocks that own the weights this block computes with."""
        return self.owned[block]

    def users(self, block: int) -> tuple[int, ...]:
        """Return the blocks that compute with this block's weights."""
        return self._users[block]

    def is_layer(self, block: int) -> bool:
        """Return whether the block is a layer, not the embedding or the head."""
        return 0 < block < len(self.owned) - 1

    def is_split(self, block: int) -> bool:
        """Return whether trained tensors are resident in HBM, and frozen ones are streamed."""
        return self._split[block]

    def weight_in_hbm(self, block: int) -> bool:
        """Return whether all of the block's weights are resident in HBM."""
        return self._weight_in_hbm[block]

    def weight_on_nvme(self, block: int) -> bool:
        """Return whether any of the block's weights are stored on NVMe."""
        return self._weight_on_nvme[block]

    def adds_to(self, block: int) -> tuple[int, ...]:
        """Return the blocks whose gradients this block's backward adds to.

        That is the block itself and, for a tied head, also the embedding.
        """
        owners = (*self.owned[block], block) if block == self.count - 1 else (block,)
        trained = (o for o in owners if self._at(o).home(Role.GRADIENT) is not None)
        return tuple(sorted(set(trained)))

    def offloads_activation(self, block: int) -> bool:
        """Return whether the block's activation is stored outside HBM."""
        return self._offloads_activation[block]

    def offloads_attention(self, block: int) -> bool:
        """Return whether results of the block's attention are stored outside HBM."""
        return self._offloads_attention[block]

    def is_kept(self, block: int) -> bool:
        """Return whether backward computes with something that the block's forward has saved."""
        return self._kept[block]

    def gradient_leaves(self, block: int) -> bool:
        """Return whether the block's gradient is stored outside HBM."""
        return self._gradient_leaves[block]

    def streams_states(self, block: int) -> bool:
        """Return whether the block's states pass through HBM to be swept there."""
        return self._at(block).streams_states

    def staged_roles(self, block: int) -> tuple[Role, ...]:
        """Return the roles that a CPU sweep must read from NVMe into host staging."""
        at = self._at(block)
        return tuple(
            role
            for role in (Role.WEIGHT, *STATE, Role.GRADIENT)
            if at.touches(role, Tier.NVME) and at.sweep == "cpu"
        )

    def interleaves(self, block: int) -> bool:
        """Return whether a CPU sweep over states in host memory is divided into pieces."""
        return (
            self.placement.sweeps_interleaved
            and self._at(block).sweep == "cpu"
            and not self.whole_tensors
            and not self.staged_roles(block)
        )

    def has_late_moments(self, block: int) -> bool:
        """Return whether a sweep updates the weights first, and the CPU the moments later."""
        return self._at(block).late_moments

    def swept_on_gpu(self, block: int) -> tuple[Role, ...]:
        """Return the roles that return to host memory after the GPU has swept a piece of them."""
        return self._at(block).swept_on_gpu

    def between_staged(self, block: int) -> tuple[int, ...]:
        """Return the blocks to sweep while this one passes through staging, in order.

        Those are the blocks in host memory that follow, up to the next one that passes through
        staging.
        """
        following = []
        for other in range(block + 1, self.count):
            if self.staged_roles(other):
                break
            if self.interleaves(other):
                following.append(other)
        return tuple(following)

    def _at(self, block: int) -> BlockPlacement:
        return self.placement.blocks[block]


Passes = Literal["step", "evaluation", "forward", "backward"]
"""What a schedule computes: a training step; forward and the loss; forward without the head, or
backward without it, for a loss that the caller computes in between."""


class WeightUse(NamedTuple):
    """One computation that needs weights."""

    block: int
    """The block that computes."""

    backward: bool
    """Whether the computation includes backward. The head's always does in training."""

    round: int
    """The round."""

    owners: tuple[int, ...]
    """The blocks whose weights it needs. The backward of a linear embedding needs none."""


class WeightWindow:
    """A window of weights in HBM that slides forward through the blocks and back.

    When backward begins, and between rounds, the blocks that are still in a slot are the next ones
    needed, so they stay. Eviction follows Belady's rule, since all uses are known in advance: the
    block whose next use is furthest in the future goes first.
    """

    def __init__(self, index: PlacementIndex, *, passes: Passes = "step") -> None:
        self.index = index
        rounds = index.placement.rounds if passes == "step" else 1
        self._keeps = passes == "step"
        self.uses, self._used_at = _uses(index.owned, index.owned_in_backward, rounds, passes)

    def next_uses(self, at: int) -> tuple[WeightUse, ...]:
        """Return use `at` and the uses to prefetch for while it computes."""
        return self.uses[at : at + self.index.placement.ahead + 1]

    def evict(self, owner: int, at: int, fetched: Iterable[tuple[int, Role]]) -> list[int]:
        """Return the blocks to drop so that `owner` can be fetched while use `at` computes."""
        needed_soon = {o for use in self.next_uses(at) for o in use.owners}
        layer = self.index.is_layer(owner)
        rivals = [
            b
            for b, role in fetched
            if role is Role.WEIGHT
            and self.index.is_layer(b) == layer
            and not self._is_pinned(b, at)
        ]
        idle = sorted(
            (b for b in rivals if b not in needed_soon), key=lambda b: (-self._next(b, at), b)
        )
        if not layer:
            # The embedding and the head are large. They stay only within a round, as a tied
            # embedding does for the head. An embedding whose own backward needs it is fetched
            # again for it, at the end of the round.
            return [b for b in idle if self._is_far(self._next(b, at), at)]
        return idle[: max(0, len(rivals) + 1 - self.index.placement.slots)]

    def _is_pinned(self, block: int, at: int) -> bool:
        """Return whether what a forward pass has saved for use `at` or later refers to the weights.

        They must not move then. Such a block does not count as one of the slots.
        """
        if not self._keeps:
            return False
        turn = self.index.count - 1  # the head's place among the uses of a round
        place = at % (2 * turn + 1)
        users = (u for u in self.index.users(block) if self.index.is_kept(u))
        return any(user < place <= 2 * turn - user for user in users)

    def _is_far(self, use: int, at: int) -> bool:
        """Return whether `use` is after all layers of the round in which use `at` is."""
        if self._round(use) > self._round(at):
            return True
        return self.uses[use].block == 0 and self.uses[use].backward

    def _round(self, at: int) -> int:
        return self.uses[at].round if at < len(self.uses) else self.uses[-1].round + 1

    def _next(self, block: int, at: int) -> int:
        """Return the index of the block's next use, or one past the last use if there is none."""
        used_at = self._used_at.get(block, ())
        following = bisect.bisect_left(used_at, at)
        return used_at[following] if following < len(used_at) else len(self.uses)


@lru_cache(maxsize=64)
def _users(owned: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for each block, the blocks that compute with its weights."""
    users: list[list[int]] = [[] for _ in owned]
    for block, owners in enumerate(owned):
        for owner in owners:
            users[owner].append(block)
    return tuple(map(tuple, users))


@lru_cache(maxsize=64)
def _uses(
    owned: tuple[tuple[int, ...], ...],
    owned_in_backward: tuple[tuple[int, ...], ...],
    rounds: int,
    passes: Passes,
) -> tuple[tuple[WeightUse, ...], Mapping[int, Sequence[int]]]:
    """Return the uses of a step, and for each block the indices of the uses that need its weights.

    They depend on no placement, and the search builds thousands of schedules.
    """
    uses = tuple(
        use
        for round in range(rounds)
        for use in _uses_of_round(owned, owned_in_backward, round, passes)
    )
    used_at: dict[int, list[int]] = {}
    for k, use in enumerate(uses):
        for owner in use.owners:
            used_at.setdefault(owner, []).append(k)
    return uses, used_at


def _uses_of_round(
    owned: tuple[tuple[int, ...], ...],
    owned_in_backward: tuple[tuple[int, ...], ...],
    round: int,
    passes: Passes,
) -> list[WeightUse]:
    """Return the uses of one round: forward, the head and backward, as far as they are computed."""
    last = len(owned) - 1
    forward_uses = [WeightUse(i, False, round, owned[i]) for i in range(last)]
    head_use = [WeightUse(last, passes == "step", round, owned[last])]
    backward_uses = [
        WeightUse(i, True, round, owned_in_backward[i]) for i in range(last - 1, -1, -1)
    ]
    parts = {
        "step": [*forward_uses, *head_use, *backward_uses],
        "evaluation": [*forward_uses, *head_use],
        "forward": forward_uses,
        "backward": backward_uses,
    }
    return parts[passes]
