"""The memory in which everything lives: each role of each block, in the tier that the plan names.

A rank stores its shard of each flat buffer. Weights in HBM are the exception: each rank computes
with all of them, so they are whole on every rank.

All of it is allocated before the first step: one buffer on the device, one arena per memory node, a
separate range for every striped home, and one store for all disks. If the machine lacks memory or
disk space, that shows here, with numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.engine.device import Device
from penstock.engine.host_arenas import HostArenas, Key, allocate_arena, arena_specs, homes
from penstock.engine.memory_usage import MemoryUsage
from penstock.engine.spans import Span
from penstock.engine.startup import HBM, HOST, STORE, StartUp
from penstock.engine.transport import Transport
from penstock.memory.arena import Arena
from penstock.memory.placement import Node
from penstock.model.inventory import Inventory
from penstock.plan.activation_overlay import gradient_order
from penstock.plan.buffers import activation_slots, micro_nbytes
from penstock.plan.lifetimes import piece_span
from penstock.plan.placement import Home
from penstock.plan.plan import Plan
from penstock.planner.resource_names import ROLE_NAMES
from penstock.roles import EXTENT, Role
from penstock.storage.engines import EngineName
from penstock.storage.layout import Extent
from penstock.storage.store import Store, StoreOptions
from penstock.tiers import Tier
from penstock.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How NVMe is accessed. None of it changes a result."""

    engine: EngineName = "auto"
    """I/O engine: `io_uring`, `threads`, or `auto`."""
    verify: bool = True
    """Whether every read is compared with the checksums of what was written."""
    erase: bool = False
    """Whether a raw device that holds data may be overwritten."""
    workers: int | None = None
    """Number of I/O threads; None for the store's default."""


class TierMemory:
    """The memory of every role of every block."""

    def __init__(
        self, plan: Plan, inventory: Inventory, device: Device, settings: StoreSettings,
        ranks: Transport, *, start_up: StartUp, host: HostArenas | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.inventory, self.device = plan, inventory, device
        self.rank, self._common = ranks.rank, ranks.memory
        self.formats = plan.workload.formats(plan.placement.rounds)
        self._data: dict[Key, torch.Tensor] = {}
        self._shared: list[tuple[Arena, list[Key]]] = []  # arenas that all ranks map
        self._peer_weights: dict[int, list[torch.Tensor]] = {}  # by block, then by rank
        self._extents: dict[tuple[int, Role, int], Extent] = {}
        self.store: Store | None = None
        self.usage = MemoryUsage(device, plan.context_nbytes)
        # Device and host memory are freed with their tensors. Only the store must be closed.
        with start_up.phase(HBM):
            self._allocate_device()
        with start_up.phase(HOST):
            self._allocate_host(host)
        try:
            with start_up.phase(STORE):
                self._allocate_disk(settings)
            self._open_peer_weights()
        except BaseException:
            self.close()
            raise

    # Lookup.

    def has(self, block: int, role: Role) -> bool:
        """Return whether the block has this role at all; frozen blocks have no gradient."""
        return self.plan.placement.blocks[block].home(role) is not None

    def on_device(self, block: int, role: Role) -> bool:
        return self._is_in(block, role, Tier.HBM)

    def on_disk(self, block: int, role: Role) -> bool:
        return self._is_in(block, role, Tier.NVME)

    def data(self, block: int, role: Role) -> torch.Tensor:
        """Return the role's bytes, in host or device memory."""
        return self._data[block, role]

    def span(self, block: int, role: Role) -> Span:
        """Return the trainable elements of a role that this rank stores."""
        return self.spans(block, role)[0]

    def is_split(self, block: int) -> bool:
        """Return whether trained tensors are on the device, and frozen ones are elsewhere."""
        return self.plan.placement.blocks[block].is_split

    def streamed_spans(self, block: int) -> tuple[Span, ...]:
        """Return the weights in host memory that are fetched: of a split block, the frozen ones."""
        spans = self.spans(block, Role.WEIGHT)
        return spans[1:] if self.is_split(block) else spans

    def spans(self, block: int, role: Role) -> tuple[Span, ...]:
        """Return all elements of a role that this rank stores, in host or device memory.

        Of weights, the trainable elements come first and the frozen ones follow: as one span if
        they are whole, else as a shard of each.
        """
        spec, data = self.inventory.blocks[block], self._data[block, role]
        if role is Role.WEIGHT and self.is_split(block):
            first = spec.flat_elements(True)
            trained = Span(role, data, 0, first, self.formats)
            if self._is_in(block, Role.FROZEN, Tier.NVME):
                return (trained,)
            frozen = self._data[block, Role.FROZEN]
            return trained, Span(role, frozen, first, spec.flat_elements(False), self.formats)
        if role is Role.WEIGHT and self.on_device(block, role):
            count = spec.flat_elements(True) + spec.flat_elements(False)
            return (Span(role, data, 0, count, self.formats),)
        return self._shards(block, role, data, self.rank)

    def peer_weights(self, block: int) -> tuple[Span, ...] | None:
        """Return the weights of a block that other ranks store, in memory that this rank maps too.

        None if they are elsewhere. The other ranks may be updating them.
        """
        if block not in self._peer_weights:
            return None
        by_rank = enumerate(self._peer_weights[block])
        return tuple(
            span
            for rank, data in by_rank
            if rank != self.rank
            for span in self._shards(block, Role.WEIGHT, data, rank)
        )

    def _shards(self, block: int, role: Role, data: torch.Tensor, rank: int) -> tuple[Span, ...]:
        spec, first = self.inventory.blocks[block], self.first_element
        count = spec.role_elements(role, 0, spec.shard_elements(True))
        trained = Span(role, data, first(block, True, rank), count, self.formats)
        count = spec.shard_elements(False)
        if role is not Role.WEIGHT or not count:
            return (trained,)
        frozen = data[trained.nbytes :]
        return trained, Span(role, frozen, first(block, False, rank), count, self.formats)

    def first_element(self, block: int, trainable: bool, rank: int | None = None) -> int:
        """Return the index of the first element of a rank's shard in the block's flat buffers.

        By default that of this rank. The flat buffer of frozen tensors follows that of trainable
        ones.
        """
        spec = self.inventory.blocks[block]
        before = 0 if trainable else spec.flat_elements(True)
        return before + (self.rank if rank is None else rank) * spec.shard_elements(trainable)

    def extent(self, block: int, role: Role, part: int) -> Extent:
        """Return the place on disk of a piece of the block, or of a micro-batch of its input."""
        return self._extents[block, role, part]

    def pieces(self, block: int, role: Role) -> range:
        """Return the pieces into which a role is cut; those of frozen weights come last."""
        step, spec = self.plan.placement.piece_elements, self.inventory.blocks[block]
        trained, frozen = (len(spec.pieces(step, trainable=each)) for each in (True, False))
        if role is Role.FROZEN:
            return range(trained, trained + frozen)
        return range(trained + (frozen if role is Role.WEIGHT else 0))

    def piece_span(self, block: int, piece: int) -> tuple[int, int, bool]:
        """Return a piece's first element in the shard, its end, and whether it is trainable."""
        return piece_span(self.inventory.blocks[block], piece, self.plan.placement)

    def close(self) -> None:
        """Close the store and release the memory."""
        if self.store is not None:
            self.store.close()
        self._data.clear()
        self._peer_weights.clear()
        self._shared.clear()
        self.usage.clear()

    # Allocation.

    def _allocate_device(self) -> None:
        sizes = [(key, home.nbytes) for key, home in homes(self.plan) if _is_on(home, Tier.HBM)]
        # Gradients first, so that they are contiguous, and results of attention can overlay them.
        sizes.sort(key=lambda pair: pair[0][1] is not Role.GRADIENT)
        whole = self.device.empty(sum(nbytes for _, nbytes in sizes), "resident tensors")
        offset = 0
        for key, nbytes in sizes:
            self._data[key] = whole[offset : offset + nbytes]
            offset += nbytes
        self._overlay_activations(None, whole)

    def _allocate_host(self, host: HostArenas | None) -> None:
        """Allocate the arenas of all memory nodes, or take those that were started before."""
        specs = arena_specs(self.plan, shares_weights=self._common is not None)
        pinned = self.device.pinned
        if host is None:
            arenas = [allocate_arena(spec, pinned=pinned) for spec in specs]
        else:
            arenas = host.take(specs)
        for spec, arena in zip(specs, arenas, strict=True):
            self.usage.add_arena(arena, _bytes_by_tier(spec.members[0][1]), pinned=pinned)
            if spec.shared:
                self._shared.append((arena, [key for key, _ in spec.members]))
            gradients = [member for member in spec.members if member[0][1] is Role.GRADIENT]
            if gradients and isinstance(spec.place, Node):
                whole = self._allocate_gradients(arena, gradients)
                self._overlay_activations(spec.place.id, whole)
            for key, home in spec.members:
                if key not in self._data:
                    self._data[key] = self._tensor(arena, key, home)

    def _open_peer_weights(self) -> None:
        """Map the weights of all other ranks, which are laid out like those of this one."""
        if self._common is None:
            return
        mailbox = self._common.mailbox
        self.usage.add_arena(mailbox, {Tier.DRAM: mailbox.stats.capacity})
        arenas = [arena for arena, _ in self._shared]
        by_rank = self._common.open_arenas(arenas)
        for index, (_, keys) in enumerate(self._shared):
            for block, role in keys:
                home = self.plan.placement.blocks[block].home(role)
                assert home is not None
                self._peer_weights[block] = [
                    self._data[block, role]
                    if rank == self.rank
                    else self._tensor(theirs[index], (block, role), home)
                    for rank, theirs in enumerate(by_rank)
                ]

    def _allocate_gradients(self, arena: Arena, members: list[tuple[Key, Home]]) -> torch.Tensor:
        """Allocate gradients contiguously in their order, so that activations can overlay them.

        Returns the bytes of all of them.
        """
        nbytes = sum(home.nbytes for _, home in members)
        whole = arena.tensor(nbytes, torch.uint8, align=EXTENT, name="gradients")
        offset = 0
        order = gradient_order(self.plan.placement.blocks)
        for key, home in sorted(members, key=lambda member: order.index(member[0][0])):
            self._data[key] = whole[offset : offset + home.nbytes]
            offset += home.nbytes
        return whole

    def _overlay_activations(self, node: int | None, gradients: torch.Tensor) -> None:
        """Place activations and results of attention in the bytes of gradients, as planned.

        They are used up before the gradient in its bytes is written again
        (`plan/activation_overlay.py`).
        """
        for (block, role), overlay in self.plan.overlaid_activations().items():
            home = self.plan.placement.blocks[block].home(role)
            assert home is not None
            if overlay.node == node:
                end = overlay.offset + home.nbytes
                self._data[block, role] = gradients[overlay.offset : end]

    def _tensor(self, arena: Arena, key: Key, home: Home) -> torch.Tensor:
        name = f"{key[1]} of {self.inventory.blocks[key[0]].name}"
        return arena.tensor(home.nbytes, torch.uint8, align=EXTENT, name=name)

    def _allocate_disk(self, settings: StoreSettings) -> None:
        extents = list(self._disk_extents())
        if not extents:
            return
        by_path = self._disk_nbytes()
        paths, weights = list(by_path), [float(nbytes) for nbytes in by_path.values()]
        options = StoreOptions(weights=weights if len(paths) > 1 else None)
        if settings.workers is not None:
            options = StoreOptions(weights=options.weights, workers=settings.workers)
        granule = EXTENT if len(paths) == 1 else options.unit
        self.store = Store.create(
            paths,
            sum(round_up(nbytes, granule) for _, nbytes in extents),
            engine=settings.engine,
            verify=settings.verify,
            erase=settings.erase,
            options=options,
        )
        self.usage.add_store(self.store)
        for (block, role, part), nbytes in extents:
            unit = "micro-batch" if role is Role.ACTIVATION else "piece"
            name = f"{ROLE_NAMES[role]} of {self.inventory.blocks[block].name}, {unit} {part}"
            self._extents[block, role, part] = self.store.allocate(nbytes, name=name)

    def _disk_nbytes(self) -> dict[str, int]:
        """Return the bytes that the plan stores on each NVMe path that it uses."""
        used: Counter[str] = Counter()
        for _, home in homes(self.plan):
            for share in home.shares:
                used[share.path] += share.nbytes if share.path else 0
        return {path.path: used[path.path] for path in self.plan.budget.nvme if used[path.path]}

    def _disk_extents(self) -> Iterator[tuple[tuple[int, Role, int], int]]:
        """Yield (block, role, piece or micro-batch) and size of everything on NVMe."""
        plan = self.plan
        for (block, role), home in homes(self.plan):
            if not _is_on(home, Tier.NVME):
                continue
            if role is Role.ACTIVATION:
                nbytes = micro_nbytes(self.inventory, plan.workload)
                for micro in range(activation_slots(plan.workload, plan.placement.rounds)):
                    yield (block, role, micro), nbytes
                continue
            # Pieces of frozen weights have one number, wherever the trained ones are.
            kept = Role.WEIGHT if role is Role.FROZEN else role
            for piece in self.pieces(block, role):
                start, stop, _ = self.piece_span(block, piece)
                elements = self.inventory.blocks[block].role_elements(role, start, stop)
                if elements:
                    yield (block, kept, piece), self.formats.at_rest(role, elements)

    def _is_in(self, block: int, role: Role, tier: Tier) -> bool:
        home = self.plan.placement.blocks[block].home(role)
        return home is not None and _is_on(home, tier)


def _is_on(home: Home, tier: Tier) -> bool:
    return any(share.tier is tier for share in home.shares)


def _bytes_by_tier(home: Home) -> dict[Tier, int]:
    nbytes: dict[Tier, int] = {}
    for share in home.shares:
        nbytes[share.tier] = nbytes.get(share.tier, 0) + share.nbytes
    return nbytes
