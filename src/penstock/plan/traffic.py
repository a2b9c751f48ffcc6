"""The bytes that each operation of a schedule moves: the one source for cost, wear and reports.

There are two levels of detail:

- `Traffic.transfers` is exact for given micro-batch shapes. The engine moves exactly these bytes,
  so the report can compare what was planned with what was recorded, and the drive-wear estimate
  counts the writes among them.
- `Traffic.stored_parts` is what the cost model times. It counts whole pages of what is stored, for
  a full round, so that it depends on the placement only and equal blocks share one result.

Links are `h2d`, `d2h`, `disk:<path>` and `node<n>`. The traffic of a memory node also contains what
passes through it on the way to another link, so sums make sense per link, not over links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.model.attention_sizes import attention_result_nbytes
from penstock.model.inventory import Inventory
from penstock.plan.buffers import deal_micro_batches
from penstock.plan.lifetimes import operation_span, piece_span
from penstock.plan.placement import Placement, Share
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.workload import Workload
from penstock.roles import EXTENT, MOMENTS, TRAINED, Formats, Role
from penstock.tiers import Tier
from penstock.units import round_up

Endpoint = Literal["gpu", "host", "disk"]

DISK = "disk:"
"""Prefix of a disk's link. The disk's path follows."""

MicroBatchShape = tuple[int, int]
"""Number of sequences of one micro-batch, and their length in tokens."""

_H2D: tuple[Endpoint, Endpoint] = ("host", "gpu")
_D2H: tuple[Endpoint, Endpoint] = ("gpu", "host")


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """Bytes that move over one link."""

    link: str
    nbytes: int
    source: Endpoint
    target: Endpoint


class StoredPart(NamedTuple):
    """Bytes of one role in one location that an operation moves or updates."""

    role: Role
    share: Share
    nbytes: float
    """Number of bytes. A piece's part of a share need not be whole bytes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Computes the bytes of operations for one model, workload and placement."""

    inventory: Inventory
    placement: Placement
    formats: Formats

    @classmethod
    def of(cls, inventory: Inventory, workload: Workload, placement: Placement) -> Traffic:
        """Take the formats from the workload."""
        inventory = workload.stored(inventory)
        return cls(inventory, placement, workload.formats(placement.rounds))

    # Exact.

    def transfers(
        self, operation: Operation, shapes: Sequence[MicroBatchShape]
    ) -> tuple[LinkTransfer, ...]:
        """Return an operation's transfers, to the byte.

        `shapes` are those of the micro-batches of the operation's round. The transfers of a CPU
        sweep are its reads and writes of memory.
        """
        moved = [shapes[micro] for micro in self.micro_batches(operation, len(shapes))]
        return self._transfers(operation, moved)

    def micro_transfers(
        self, operation: Operation, shapes: Sequence[MicroBatchShape]
    ) -> dict[int, tuple[LinkTransfer, ...]]:
        """Return the same by micro-batch, of an operation that moves one after another."""
        numbers = self.micro_batches(operation, len(shapes))
        return {micro: self._transfers(operation, [shapes[micro]]) for micro in numbers}

    def micro_batches(self, operation: Operation, count: int) -> range:
        """Return which of the `count` micro-batches of its round an operation moves."""
        if operation.roles != (Role.ATTENTION,):
            return range(count)
        attended = self.placement.blocks[operation.block].attended
        return range(min(attended.start, count), min(attended.stop, count))

    def _transfers(
        self, operation: Operation, shapes: Sequence[MicroBatchShape]
    ) -> tuple[LinkTransfer, ...]:
        match operation.verb:
            case Verb.FETCH | Verb.OFFLOAD if operation.gpu:
                transfers = self._state_transfers(operation)
            case Verb.FETCH | Verb.OFFLOAD:
                transfers = self._copy_transfers(operation, shapes)
            case Verb.READ | Verb.WRITE:
                transfers = self._staging_transfers(operation)
            case Verb.SWEEP if self.updates_whole(operation.block):
                transfers = self._update_transfers(operation)
            case Verb.SWEEP if not operation.gpu:
                transfers = self._sweep_transfers(operation)
            case _:
                return ()
        return tuple(transfer for transfer in transfers if transfer.nbytes)

    def _copy_transfers(
        self, operation: Operation, shapes: Sequence[MicroBatchShape]
    ) -> Iterator[LinkTransfer]:
        """Yield the transfers of a copy between the host and the GPU."""
        fetches = operation.verb is Verb.FETCH
        parts = self._copied_nbytes(operation, shapes)
        nbytes = sum(parts)
        link, ends = ("h2d", _H2D) if fetches else ("d2h", _D2H)
        yield LinkTransfer(link, nbytes, *ends)
        (role,) = operation.roles
        shares = self._moved_shares(operation.block, role)
        through_disk = any(share.path for share in shares)
        # Weights on disk have a READ operation of their own, which counts their disk traffic.
        if through_disk and role is not Role.WEIGHT:
            pages = sum(round_up(part, EXTENT) for part in parts)
            yield from _disk_transfers(shares, pages, reads=fetches)
        if through_disk:
            yield from self._node_transfers([(None, nbytes)])
        else:
            yield from self._node_transfers(_without_padding(shares, nbytes))

    def _state_transfers(self, operation: Operation) -> Iterator[LinkTransfer]:
        """Yield the transfers of a piece that the GPU sweeps and that is stored in host memory."""
        block = self.inventory.blocks[operation.block]
        start, stop, _ = operation_span(block, operation, self.placement)
        touched: list[tuple[int | None, int]] = []
        total = 0
        for role in operation.roles:
            nbytes = self.formats.nbytes(role, block.role_elements(role, start, stop))
            shares = self._shares(operation.block, role)
            whole = max(1, sum(share.nbytes for share in shares))
            touched += [(share.node, nbytes * share.nbytes // whole) for share in shares]
            total += nbytes if shares else 0
        fetches = operation.verb is Verb.FETCH
        yield LinkTransfer("h2d" if fetches else "d2h", total, *(_H2D if fetches else _D2H))
        yield from self._node_transfers(touched)

    def _copied_nbytes(self, operation: Operation, shapes: Sequence[MicroBatchShape]) -> list[int]:
        """Return the bytes of each part; on disk, each part is one extent."""
        (role,) = operation.roles
        block = self.inventory.blocks[operation.block]
        if role is Role.ACTIVATION:
            width = self.formats.nbytes(role, self.inventory.hidden)
            return [rows * length * width for rows, length in shapes]
        if role is Role.ATTENTION:
            return [
                attention_result_nbytes(
                    tokens=rows * length,
                    query_width=block.query_width,
                    heads=block.heads,
                    element=self.formats.weight_format.weight,
                )
                for rows, length in shapes
            ]
        if role is Role.GRADIENT:
            spans = block.pieces(self.placement.piece_elements)
            if not any(share.path for share in self._shares(operation.block, role)):
                spans = ((0, block.shard_elements(True)),)
            return [self.formats.nbytes(role, stop - start) for start, stop in spans]
        if operation.piece is None:
            elements = self._streamed_elements(operation.block)
        else:
            start, stop, _ = piece_span(block, operation.piece, self.placement)
            elements = stop - start
        return [self.formats.nbytes(role, elements)]

    def _staging_transfers(self, operation: Operation) -> Iterator[LinkTransfer]:
        """Yield the transfers of one piece between a disk and host staging."""
        assert operation.piece is not None
        block = self.inventory.blocks[operation.block]
        start, stop, _ = piece_span(block, operation.piece, self.placement)
        nbytes, reads = 0, operation.verb is Verb.READ
        by_link: Counter[str] = Counter()
        for role in operation.roles:
            moved = self.formats.at_rest(role, block.role_elements(role, start, stop))
            shares = self._moved_shares(operation.block, role)
            for transfer in _disk_transfers(shares, moved, reads=reads):
                by_link[transfer.link] += transfer.nbytes
            nbytes += moved
        ends: tuple[Endpoint, Endpoint] = ("disk", "host") if reads else ("host", "disk")
        yield from (LinkTransfer(link, moved, *ends) for link, moved in by_link.items())
        yield from self._node_transfers([(None, nbytes)])

    def _sweep_transfers(self, operation: Operation) -> Iterator[LinkTransfer]:
        """Yield the memory traffic of a CPU sweep.

        The sweep reads every role that it needs, and writes what it updates.
        """
        block = self.inventory.blocks[operation.block]
        start, stop = 0, block.shard_elements(True)
        if operation.piece is not None:
            start, stop, _ = piece_span(block, operation.piece, self.placement)
        touched: list[tuple[int | None, int]] = []
        for role in swept_roles(operation):
            shares = self._host_shares(operation.block, role)
            elements = block.role_elements(role, start, stop)
            nbytes = self.formats.nbytes(role, elements) if shares else 0
            nbytes *= 2 if writes(operation, role) else 1
            whole = max(1, sum(share.nbytes for share in shares))
            touched += [(share.node, nbytes * share.nbytes // whole) for share in shares]
        yield from self._node_transfers(touched)

    def _update_transfers(self, operation: Operation) -> Iterator[LinkTransfer]:
        """Yield the copies of an update of whole tensors, which the device computes.

        What is in host memory passes through the device and back, except for the gradient, which is
        only read. Adafactor reads it three times, and the weights twice.
        """
        block = self.inventory.blocks[operation.block]
        start, stop = 0, block.shard_elements(True)
        if operation.piece is not None:
            start, stop, _ = piece_span(block, operation.piece, self.placement)
        moved: Counter[str] = Counter()
        touched: list[tuple[int | None, int]] = []
        for role in TRAINED:
            shares = self._host_shares(operation.block, role)
            nbytes = self.formats.nbytes(role, block.role_elements(role, start, stop))
            nbytes = nbytes if shares else 0
            read, written = self.update_passes(role)
            moved["h2d"] += read * nbytes
            moved["d2h"] += written * nbytes
            whole = max(1, sum(share.nbytes for share in shares))
            passes = read + written
            touched += [(share.node, passes * nbytes * s // whole) for share in shares
                        for s in (share.nbytes,)]  # fmt: skip
        yield LinkTransfer("h2d", moved["h2d"], *_H2D)
        yield LinkTransfer("d2h", moved["d2h"], *_D2H)
        yield from self._node_transfers(touched)

    def updates_whole(self, block: int) -> bool:
        """Return whether the device updates the tensors of a block as a whole.

        Muon does so with the matrices of layers. Their norms and biases are too small to count.
        """
        model = self.inventory.blocks[block]
        return model.second is not None and (
            self.formats.optimizer == "adafactor" or model.kind == "layer"
        )

    def update_passes(self, role: Role) -> tuple[int, int]:
        """Return how often an update of whole tensors reads and writes a role."""
        adafactor = self.formats.optimizer == "adafactor"
        if role is Role.GRADIENT:
            return (3 if adafactor else 1), 0
        return (2 if adafactor and role is not Role.SECOND else 1), 1

    def _host_shares(self, block: int, role: Role) -> tuple[Share, ...]:
        """Return the shares of a role that are not in HBM."""
        return tuple(s for s in self._shares(block, role) if s.tier is not Tier.HBM)

    def _node_transfers(self, moved: Sequence[tuple[int | None, int]]) -> Iterator[LinkTransfer]:
        """Sum bytes by node. A node of None stands for host staging."""
        by_node: Counter[int] = Counter()
        for node, nbytes in moved:
            node = self.placement.host_node if node is None else node
            if node is not None:  # the OS chose it, and nobody knows which
                by_node[node] += nbytes
        for node, nbytes in sorted(by_node.items()):
            yield LinkTransfer(f"node{node}", nbytes, "host", "host")

    # For the cost model.

    def stored_parts(self, operation: Operation) -> Iterator[StoredPart]:
        """Yield the stored bytes that a copy, a disk operation or a sweep covers.

        Bytes count once, whether they are read, written or both. What a sweep writes of them, see
        `writes`.
        """
        fraction = self._piece_fraction(operation)
        block = self.inventory.blocks[operation.block]
        trained, split = block.shard_elements(True), self.placement.blocks[operation.block].is_split
        whole = trained if split else trained + block.shard_elements(False)
        sweeps = operation.verb is Verb.SWEEP or operation.gpu
        shares_of = self._shares if sweeps else self._moved_shares
        for role in swept_roles(operation) if operation.verb is Verb.SWEEP else operation.roles:
            # A sweep touches the trainable part of the weights only, and of those that are whole in
            # HBM only the rank's shard.
            scale = trained / whole if sweeps and role is Role.WEIGHT else 1.0
            for share in shares_of(operation.block, role):
                copies = block.shards if role is Role.WEIGHT and share.tier is Tier.HBM else 1
                yield StoredPart(role, share, fraction * scale * share.nbytes / copies)

    def gpu_sweep_nbytes(self, operation: Operation) -> int:
        """Return the bytes of HBM that a sweep on the GPU reads and writes."""
        parts = self.stored_parts(operation)
        return int(sum(p.nbytes if p.role is Role.GRADIENT else 2 * p.nbytes for p in parts))

    def _piece_fraction(self, operation: Operation) -> float:
        """Return the fraction of the block's buffer that the operation's piece is."""
        if operation.piece is None:
            return 1.0
        block = self.inventory.blocks[operation.block]
        start, stop, trained = operation_span(block, operation, self.placement)
        if operation.roles == (Role.WEIGHT,):  # the stored weights include frozen tensors
            return (stop - start) / self._streamed_elements(operation.block)
        assert trained
        return (stop - start) / block.shard_elements(True)

    def _streamed_elements(self, block: int) -> int:
        """Return the number of weights of a block that are fetched, in this rank's shard."""
        model = self.inventory.blocks[block]
        split = self.placement.blocks[block].is_split
        return (0 if split else model.shard_elements(True)) + model.shard_elements(False)

    def _moved_shares(self, block: int, role: Role) -> tuple[Share, ...]:
        """Return where that is stored of a role which is fetched or offloaded."""
        is_split = role is Role.WEIGHT and self.placement.blocks[block].is_split
        return self._shares(block, Role.FROZEN if is_split else role)

    def _shares(self, block: int, role: Role) -> tuple[Share, ...]:
        home = self.placement.blocks[block].home(role)
        return home.shares if home is not None else ()


# Sweeps.


def swept_roles(operation: Operation) -> tuple[Role, ...]:
    """Return the roles that a sweep reads. That of the moments reads no weights."""
    return (*MOMENTS, Role.GRADIENT) if operation.roles == MOMENTS else TRAINED


def writes(operation: Operation, role: Role) -> bool:
    """Return whether a sweep writes a role that it reads."""
    return role in operation.roles and role is not Role.GRADIENT


# Whole steps.


def step_traffic(
    inventory: Inventory, workload: Workload, placement: Placement, schedule: Schedule
) -> dict[str, int]:
    """Return the bytes over each link in one step with a full batch."""
    total: Counter[str] = Counter()
    for transfer in _transfers(inventory, workload, placement, schedule.operations):
        total[transfer.link] += transfer.nbytes
    return dict(sorted(total.items()))


def step_disk_writes(
    inventory: Inventory, workload: Workload, placement: Placement, schedule: Schedule
) -> dict[str, int]:
    """Return the bytes that one step with a full batch writes to each disk, by path."""
    written: Counter[str] = Counter()
    writing = (o for o in schedule.operations if o.verb in (Verb.WRITE, Verb.OFFLOAD))
    for transfer in _transfers(inventory, workload, placement, writing):
        if transfer.target == "disk":
            written[transfer.link.removeprefix(DISK)] += transfer.nbytes
    return dict(sorted(written.items()))


def _transfers(
    inventory: Inventory, workload: Workload, placement: Placement, operations: Iterable[Operation]
) -> Iterator[LinkTransfer]:
    traffic = Traffic.of(inventory, workload, placement)
    shapes = planned_shapes(workload, placement.rounds)
    for operation in operations:
        yield from traffic.transfers(operation, shapes[operation.round])


def planned_shapes(workload: Workload, rounds: int) -> list[list[MicroBatchShape]]:
    """Return the shapes of a full batch's micro-batches by round, as rank 0 computes them."""
    size, length = workload.numerics.micro_batch, workload.context
    micros = [(min(size, workload.batch - at), length) for at in range(0, workload.batch, size)]
    return [list(each) for each in deal_micro_batches(micros, workload, rounds)]


def _disk_transfers(shares: Sequence[Share], nbytes: int, *, reads: bool) -> Iterator[LinkTransfer]:
    """Divide bytes over several paths in proportion to the shares."""
    on_disk = [share for share in shares if share.path]
    whole, left = sum(share.nbytes for share in on_disk), nbytes
    for number, share in enumerate(on_disk):
        part = left if number == len(on_disk) - 1 else nbytes * share.nbytes // whole
        left -= part
        ends: tuple[Endpoint, Endpoint] = ("disk", "host") if reads else ("host", "disk")
        yield LinkTransfer(f"{DISK}{share.path}", part, *ends)


def _without_padding(shares: Sequence[Share], nbytes: int) -> list[tuple[int | None, int]]:
    """Return the bytes moved on each node: the padding of the last page is not moved."""
    moved: list[tuple[int | None, int]] = []
    for share in shares:
        part = min(share.nbytes, nbytes)
        nbytes -= part
        moved.append((share.node, part))
    return moved
