"""What a candidate takes beside what rests, without writing its schedule. Room: decide.

The search asks this of thousands. What passes through HBM depends on who streams, not on where it
comes from, so it is the same for most of them; what passes through staging is a row of pieces of
which a few are there at a time. This is the most that lives at once, and packing may take a little
more: a plan that is handed out is counted to the byte, from its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.inventory import Inventory
from penstock.placement_parts import Placement
from penstock.planner.choice import BlockSpots, Choice, Spot
from penstock.pools import pipe_lanes, pipe_nbytes, pools
from penstock.roles import STATE, Formats, Role
from penstock.step_order import step_schedule
from penstock.tiers import Tier
from penstock.workload import Workload


class _Run(NamedTuple):
    """Pieces of one block that pass through staging one after the other."""

    head: tuple[int, ...]
    """Bytes of the first of them: those that may meet what came before."""

    tail: tuple[int, ...]
    """Bytes of the last."""

    most: int
    """The most at once, of its own."""


@dataclass(slots=True)
class QuickNeeds:
    """For one model, one workload and one size of pieces."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is to be done."""

    context_nbytes: int
    """What the driver takes."""

    placement: Callable[[Choice], Placement]
    """How a candidate is written out."""

    known_hbm: dict[Choice, int] = field(default_factory=dict)
    """Of candidates asked about before. Depends on no budget."""

    _runs: dict[object, _Run] = field(init=False, default_factory=dict)

    def of(self, choice: Choice) -> dict[Tier, int]:
        placement = self.placement(choice)
        pipes = len(pipe_lanes(self.workload, placement))
        dram = pipes * pipe_nbytes(self.inventory, self.workload, placement)
        dram += self._staging(choice, placement)
        return {Tier.HBM: self.hbm(choice), Tier.DRAM: dram}

    def hbm(self, choice: Choice) -> int:
        """As if everything outside HBM were in DRAM."""
        spots = tuple(map(_nearer, choice.spots))
        alike = Choice(spots, choice.rounds, choice.slots, choice.ahead)
        if alike not in self.known_hbm:
            placement = self.placement(alike)
            found = pools(
                self.inventory,
                self.workload,
                placement,
                step_schedule(self.inventory, placement),
                context_nbytes=self.context_nbytes,
            )
            self.known_hbm[alike] = sum(pool.nbytes for pool in found if pool.tier is Tier.HBM)
        return self.known_hbm[alike]

    def _staging(self, choice: Choice, placement: Placement) -> int:
        """The most of it at once: the sweeps' pieces on the way forth, weights on the way back."""
        window = placement.pieces_staged
        formats = self.workload.formats(choice.rounds)
        most = 0
        before: tuple[int, ...] = ()
        for block, roles in _reads(choice):
            run = self._run(block, roles, placement, formats)
            joined = before + run.head
            most = max(most, run.most, _most(joined, window))
            before = (before + run.tail)[1 - window :]
        return most

    def _run(
        self, block: int, roles: tuple[Role, ...], placement: Placement, formats: Formats
    ) -> _Run:
        model, step, window = (
            self.inventory.blocks[block],
            placement.piece_elements,
            placement.pieces_staged,
        )
        trained = model.pieces(step)
        frozen = model.pieces(step, trainable=False) if Role.WEIGHT in roles else ()
        key = (trained, frozen, roles, formats)
        if key not in self._runs:
            sizes = [_nbytes(formats, roles, piece) for piece in trained]
            sizes += [_nbytes(formats, (Role.WEIGHT,), piece) for piece in frozen]
            head, tail = tuple(sizes[: window - 1]), tuple(sizes[1 - window :])
            self._runs[key] = _Run(head, tail, _most(tuple(sizes), window))
        return self._runs[key]


def _reads(choice: Choice) -> Iterator[tuple[int, tuple[Role, ...]]]:
    """What is read from NVMe into staging, block by block, in about the order of a step."""
    for block, spots in enumerate(choice.spots):
        roles: tuple[Role, ...] = (Role.WEIGHT,) if spots.weight is Spot.NVME else ()
        roles += STATE if spots.state is Spot.NVME else ()
        roles += (Role.GRADIENT,) if spots.gradient is Spot.NVME else ()
        if roles:
            yield block, roles
    for block in range(len(choice.spots) - 1, -1, -1):
        if choice.spots[block].weight is Spot.NVME:
            yield block, (Role.WEIGHT,)


def _nearer(spots: BlockSpots) -> BlockSpots:
    def near(spot: Spot | None) -> Spot | None:
        return spot if spot is None or spot is Spot.HBM else Spot.DRAM

    return BlockSpots(*map(near, spots))


def _nbytes(formats: Formats, roles: tuple[Role, ...], piece: tuple[int, int]) -> int:
    return sum(formats.at_rest(role, piece[1] - piece[0]) for role in roles)


def _most(sizes: tuple[int, ...], window: int) -> int:
    return max((sum(sizes[k : k + window]) for k in range(len(sizes))), default=0)
