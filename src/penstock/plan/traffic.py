"""What each operation of a schedule moves, over which link, to the byte. Room: decide.

The engine moves exactly these bytes, so what is planned per step can be laid beside what was seen.
Links are `h2d` and `d2h`, a disk by its path, and each memory node, whose traffic is counted where
something else passes through it: sums make sense per link, not over links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.model.inventory import Inventory
from penstock.plan.buffers import round_micro_batches
from penstock.plan.lifetimes import piece_span
from penstock.plan.placement import Placement, Share
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.workload import Workload
from penstock.roles import EXTENT, TRAINED, Formats, Role
from penstock.tiers import Tier
from penstock.units import round_up

Place = Literal["gpu", "host", "disk"]

DISK = "disk:"
"""What the link to a disk begins with; its path follows."""

Shape = tuple[int, int]
"""Sequences and tokens of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes over one link."""

    link: str
    nbytes: int
    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class Traffic:
    """Everything that the bytes of an operation depend on."""

    inventory: Inventory
    placement: Placement
    formats: Formats

    @classmethod
    def of(cls, inventory: Inventory, workload: Workload, placement: Placement) -> Traffic:
        return cls(inventory, placement, workload.formats(placement.rounds))

    def transfers(self, operation: Operation, shapes: Sequence[Shape]) -> tuple[Transfer, ...]:
        """`shapes` are of the micro-batches of its round. A sweep's are its memory traffic."""
        match operation.verb:
            case Verb.FETCH | Verb.DRAIN:
                found = self._copies(operation, shapes)
            case Verb.READ | Verb.WRITE:
                found = self._staged(operation)
            case Verb.SWEEP if not operation.gpu:
                found = self._swept(operation)
            case _:
                return ()
        return tuple(transfer for transfer in found if transfer.nbytes)

    # Between the host and the GPU.

    def _copies(self, operation: Operation, shapes: Sequence[Shape]) -> Iterator[Transfer]:
        fetches = operation.verb is Verb.FETCH
        parts = self._copied(operation, shapes)
        nbytes = sum(parts)
        link, ends = ("h2d", _IN) if fetches else ("d2h", _OUT)
        yield Transfer(link, nbytes, *ends)
        (role,) = operation.roles
        shares = self._shares(operation.block, role)
        through_disk = any(share.path for share in shares)
        if through_disk and role is not Role.WEIGHT:  # weights were read by an operation before
            pages = sum(round_up(part, EXTENT) for part in parts)
            yield from _disks(shares, pages, reads=fetches)
        if through_disk:
            yield from self._nodes([(None, nbytes)])
        else:
            yield from self._nodes(_clipped(shares, nbytes))

    def _copied(self, operation: Operation, shapes: Sequence[Shape]) -> list[int]:
        """Bytes of each part that is one extent, where a disk holds it."""
        (role,) = operation.roles
        block = self.inventory.blocks[operation.block]
        if role is Role.INPUT:
            width = self.formats.nbytes(role, self.inventory.hidden)
            return [rows * length * width for rows, length in shapes]
        if role is Role.GRADIENT:
            spans = block.pieces(self.placement.piece_elements)
            if not any(share.path for share in self._shares(operation.block, role)):
                spans = ((0, block.flat_elements(True)),)
            return [self.formats.nbytes(role, stop - start) for start, stop in spans]
        if operation.piece is None:
            elements = block.flat_elements(True) + block.flat_elements(False)
        else:
            start, stop, _ = piece_span(block, operation.piece, self.placement)
            elements = stop - start
        return [self.formats.nbytes(role, elements)]

    # Between the host and disks, a piece at a time.

    def _staged(self, operation: Operation) -> Iterator[Transfer]:
        assert operation.piece is not None
        block = self.inventory.blocks[operation.block]
        start, stop, _ = piece_span(block, operation.piece, self.placement)
        nbytes, reads = 0, operation.verb is Verb.READ
        by_link: Counter[str] = Counter()
        for role in operation.roles:
            moved = self.formats.at_rest(role, stop - start)
            for transfer in _disks(self._shares(operation.block, role), moved, reads=reads):
                by_link[transfer.link] += transfer.nbytes
            nbytes += moved
        ends: tuple[Place, Place] = ("disk", "host") if reads else ("host", "disk")
        yield from (Transfer(link, moved, *ends) for link, moved in by_link.items())
        yield from self._nodes([(None, nbytes)])

    # Over memory, by the CPU.

    def _swept(self, operation: Operation) -> Iterator[Transfer]:
        """What is read and what is written back: all but the gradient."""
        block = self.inventory.blocks[operation.block]
        start, stop = 0, block.flat_elements(True)
        if operation.piece is not None:
            start, stop, _ = piece_span(block, operation.piece, self.placement)
        touched: list[tuple[int | None, int]] = []
        for role in TRAINED:
            shares = self._shares(operation.block, role)
            nbytes = self.formats.nbytes(role, stop - start) if shares else 0
            nbytes *= 1 if role is Role.GRADIENT else 2
            whole = max(1, sum(share.nbytes for share in shares))
            touched += [(share.node, nbytes * share.nbytes // whole) for share in shares]
        yield from self._nodes(touched)

    # Places.

    def _shares(self, block: int, role: Role) -> tuple[Share, ...]:
        home = self.placement.blocks[block].home(role)
        return home.shares if home is not None else ()

    def _nodes(self, moved: Sequence[tuple[int | None, int]]) -> Iterator[Transfer]:
        """None is for staging, which is on the first node of DRAM that the plan uses."""
        by_node: Counter[int] = Counter()
        for node, nbytes in moved:
            by_node[staging_node(self.placement) if node is None else node] += nbytes
        for node, nbytes in sorted(by_node.items()):
            yield Transfer(f"node{node}", nbytes, "host", "host")


_IN: tuple[Place, Place] = ("host", "gpu")
_OUT: tuple[Place, Place] = ("gpu", "host")


def staging_node(placement: Placement) -> int:
    nodes = {
        share.node
        for block in placement.blocks
        for home in block.homes
        for share in home.shares
        if share.tier is Tier.DRAM and share.node is not None
    }
    return min(nodes, default=0)


def step_traffic(
    inventory: Inventory, workload: Workload, placement: Placement, schedule: Schedule
) -> dict[str, int]:
    """Bytes over each link in one step with a full batch."""
    traffic = Traffic.of(inventory, workload, placement)
    shapes = planned_shapes(workload, placement)
    total: Counter[str] = Counter()
    for operation in schedule.operations:
        for transfer in traffic.transfers(operation, shapes[operation.round]):
            total[transfer.link] += transfer.nbytes
    return dict(sorted(total.items()))


def planned_shapes(workload: Workload, placement: Placement) -> list[list[Shape]]:
    """By round, the micro-batches of a full batch."""
    size, length = workload.numerics.micro_batch, workload.context
    micros = [(min(size, workload.batch - at), length) for at in range(0, workload.batch, size)]
    count = round_micro_batches(workload, placement.rounds)
    return [micros[r * count : (r + 1) * count] for r in range(placement.rounds)]


def _disks(shares: Sequence[Share], nbytes: int, *, reads: bool) -> Iterator[Transfer]:
    """Over several paths they are dealt as the shares are."""
    on_disk = [share for share in shares if share.path]
    whole, left = sum(share.nbytes for share in on_disk), nbytes
    for number, share in enumerate(on_disk):
        part = left if number == len(on_disk) - 1 else nbytes * share.nbytes // whole
        left -= part
        ends: tuple[Place, Place] = ("disk", "host") if reads else ("host", "disk")
        yield Transfer(f"{DISK}{share.path}", part, *ends)


def _clipped(shares: Sequence[Share], nbytes: int) -> list[tuple[int | None, int]]:
    """Of what rests in pages, what is moved: the last page's padding is not."""
    found: list[tuple[int | None, int]] = []
    for share in shares:
        part = min(share.nbytes, nbytes)
        nbytes -= part
        found.append((share.node, part))
    return found
