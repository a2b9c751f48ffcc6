"""Takes all memory that a plan names, before the first step. Room: move.

One arena for each memory node, a range for each striped home, one store for all disks, one buffer
on the device: nothing else is taken later. If the machine cannot give it, that shows here, with
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.engine.device import Device
from penstock.engine.memory_usage import MemoryUsage
from penstock.engine.spans import Span
from penstock.memory.arena import Arena
from penstock.memory.placement import Node, Stripe
from penstock.model.inventory import Inventory
from penstock.plan.buffers import micro_nbytes, round_micro_batches
from penstock.plan.lifetimes import piece_span
from penstock.plan.placement import STRIPE_UNIT, Home
from penstock.plan.plan import Plan
from penstock.roles import EXTENT, Role
from penstock.storage.engines import EngineName
from penstock.storage.layout import Extent
from penstock.storage.store import Store, StoreOptions
from penstock.tiers import Tier
from penstock.units import round_up

Key = tuple[int, Role]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What cannot change a bit of the result, about disks."""

    engine: EngineName = "auto"
    verify: bool = False
    erase: bool = False
    workers: int | None = None


class TierMemory:
    """Where every role of every block rests."""

    def __init__(
        self, plan: Plan, inventory: Inventory, device: Device, settings: StoreSettings
    ) -> None:
        self.plan, self.inventory, self.device = plan, inventory, device
        self.formats = plan.workload.formats(plan.placement.rounds)
        self._data: dict[Key, torch.Tensor] = {}
        self._extents: dict[tuple[int, Role, int], Extent] = {}
        self.store: Store | None = None
        self.holding = MemoryUsage(device.where)
        self._take_device()
        self._take_host()
        try:
            self._take_disk(settings)
        except BaseException:
            self.close()
            raise

    # What there is.

    def on_device(self, block: int, role: Role) -> bool:
        return self._at(block, role, Tier.HBM)

    def on_disk(self, block: int, role: Role) -> bool:
        return self._at(block, role, Tier.NVME)

    def has(self, block: int, role: Role) -> bool:
        return self.plan.placement.blocks[block].home(role) is not None

    def data(self, block: int, role: Role) -> torch.Tensor:
        """Its bytes, in host or device memory."""
        return self._data[block, role]

    def span(self, block: int, role: Role) -> Span:
        """All its elements: of weights, the trainable ones and then the frozen ones."""
        model = self.inventory.blocks[block]
        count = model.flat_elements(True)
        if role is Role.WEIGHT:
            count += model.flat_elements(False)
        return Span(role, self._data[block, role], 0, count, self.formats)

    def extent(self, block: int, role: Role, part: int) -> Extent:
        """On disk: of a piece of the block, or of a micro-batch of its input."""
        return self._extents[block, role, part]

    # Taking it.

    def _take_device(self) -> None:
        wanted = [(key, home.nbytes) for key, home in self._homes() if _is_on(home, Tier.HBM)]
        whole = self.device.empty(sum(n for _, n in wanted), "what rests on the device")
        at = 0
        for key, nbytes in wanted:
            self._data[key] = whole[at : at + nbytes]
            at += nbytes

    def _take_host(self) -> None:
        """One arena for all that lies on one node; what is striped has a range of its own, for a
        stripe is dealt from the beginning of a range."""
        by_node: dict[int, list[tuple[Key, Home]]] = {}
        for key, home in self._homes():
            nodes = [s.node for s in home.shares if s.node is not None]
            if len(nodes) > 1:
                arena = Arena(home.nbytes, _stripe(home), self.device.pinned)
                self.holding.took_arena(arena, _shares(home))
                self._data[key] = self._tensor(arena, key, home)
            elif nodes:
                by_node.setdefault(nodes[0], []).append((key, home))
        for node, members in by_node.items():
            arena = Arena(sum(h.nbytes for _, h in members), Node(node), self.device.pinned)
            self.holding.took_arena(arena, _shares(members[0][1]))
            gradients = [member for member in members if member[0][1] is Role.GRADIENT]
            if gradients:
                self._lend(node, self._take_gradients(arena, gradients))
            for key, home in members:
                if key not in self._data:
                    self._data[key] = self._tensor(arena, key, home)

    def _take_gradients(self, arena: Arena, members: list[tuple[Key, Home]]) -> torch.Tensor:
        """One after the other in the order of the row, so that inputs can be lent room there."""
        nbytes = sum(home.nbytes for _, home in members)
        whole = arena.tensor(nbytes, torch.uint8, align=EXTENT, name="gradients")
        at = 0
        for key, home in members:
            self._data[key] = whole[at : at + home.nbytes]
            at += home.nbytes
        return whole

    def _lend(self, node: int, gradients: torch.Tensor) -> None:
        """See `lending`: an input is over before the gradient whose place it has comes back."""
        for block, lent in self.plan.overlaid_activations().items():
            home = self.plan.placement.blocks[block].home(Role.INPUT)
            assert home is not None
            if lent.node == node:
                self._data[block, Role.INPUT] = gradients[lent.offset : lent.offset + home.nbytes]

    def _tensor(self, arena: Arena, key: Key, home: Home) -> torch.Tensor:
        name = f"{key[1]} of {self.inventory.blocks[key[0]].name}"
        return arena.tensor(home.nbytes, torch.uint8, align=EXTENT, name=name)

    def _take_disk(self, settings: StoreSettings) -> None:
        wanted = list(self._disk_parts())
        if not wanted:
            return
        paths = [path.path for path in self.plan.budget.nvme]
        weights = [float(path.nbytes) for path in self.plan.budget.nvme]
        options = StoreOptions(weights=weights if len(paths) > 1 else None)
        if settings.workers is not None:
            options = StoreOptions(weights=options.weights, workers=settings.workers)
        granule = EXTENT if len(paths) == 1 else options.unit
        self.store = Store.create(
            paths,
            sum(round_up(nbytes, granule) for _, nbytes in wanted),
            engine=settings.engine,
            verify=settings.verify,
            erase=settings.erase,
            options=options,
        )
        self.holding.took_store(self.store)
        for (block, role, part), nbytes in wanted:
            name = f"{self.inventory.blocks[block].name}.{role}.{part}"
            self._extents[block, role, part] = self.store.allocate(nbytes, name=name)

    def _disk_parts(self) -> Iterator[tuple[tuple[int, Role, int], int]]:
        plan = self.plan
        for (block, role), home in self._homes():
            if not _is_on(home, Tier.NVME):
                continue
            if role is Role.INPUT:
                nbytes = micro_nbytes(self.inventory, plan.workload)
                for micro in range(round_micro_batches(plan.workload, plan.placement.rounds)):
                    yield (block, role, micro), nbytes
                continue
            for piece in self.pieces(block, role):
                start, stop, _ = self.piece_span(block, piece)
                yield (block, role, piece), self.formats.at_rest(role, stop - start)

    def pieces(self, block: int, role: Role) -> range:
        """Which pieces a role is cut into: frozen weights have no states."""
        step, model = self.plan.placement.piece_elements, self.inventory.blocks[block]
        frozen = len(model.pieces(step, trainable=False)) if role is Role.WEIGHT else 0
        return range(len(model.pieces(step)) + frozen)

    def piece_span(self, block: int, piece: int) -> tuple[int, int, bool]:
        return piece_span(self.inventory.blocks[block], piece, self.plan.placement)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self._data.clear()
        self.holding.gave_back()

    def _homes(self) -> Iterator[tuple[Key, Home]]:
        """What takes memory or disk of its own."""
        lent = self.plan.overlaid_activations()
        for index, block in enumerate(self.plan.placement.blocks):
            for home in block.homes:
                if home.nbytes and not (home.role is Role.INPUT and index in lent):
                    yield (index, home.role), home

    def _at(self, block: int, role: Role, tier: Tier) -> bool:
        home = self.plan.placement.blocks[block].home(role)
        return home is not None and _is_on(home, tier)


def _is_on(home: Home, tier: Tier) -> bool:
    return any(share.tier is tier for share in home.shares)


def _shares(home: Home) -> dict[Tier, int]:
    """What each tier has of it."""
    found: dict[Tier, int] = {}
    for share in home.shares:
        found[share.tier] = found.get(share.tier, 0) + share.nbytes
    return found


def _stripe(home: Home) -> Stripe:
    """By what each node is to hold, in whole units; of very many, to a thousandth."""
    units = {s.node: -(-s.nbytes // STRIPE_UNIT) for s in home.shares if s.node is not None}
    most = max(1.0, sum(units.values()) / 1000)
    return Stripe({node: max(1, round(count / most)) for node, count in units.items()})
