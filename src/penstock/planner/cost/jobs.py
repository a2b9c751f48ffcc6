"""Turn a schedule into timed jobs: how many seconds of which resource each operation needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.model.inventory import Inventory
from penstock.plan.buffers import micro_batches_by_round
from penstock.plan.lifetimes import piece_span
from penstock.plan.placement import Placement, Share
from penstock.plan.schedule import COLLECTIVE, COMPUTE, Operation, Schedule, Verb
from penstock.plan.traffic import Traffic
from penstock.plan.workload import Workload
from penstock.planner.cost.compute import ComputeTime
from penstock.planner.cost.rates import Rates
from penstock.planner.cost.simulation import Job
from penstock.roles import Role
from penstock.tiers import Tier

DemandCache = dict[object, dict[str, float]]
"""Demands of operations computed before, by what they depend on."""

ISSUING = 0.3e-3
"""Host seconds to issue an operation that moves or sweeps. All threads that issue share the
interpreter's lock. Measured: 0.9 ms for a piece that is read, swept and written."""

LAUNCHING = {Verb.FORWARD: 2e-3, Verb.BACKWARD: 6e-3, Verb.LOSS: 4e-3}
"""Host seconds to launch the kernels of a layer, or of the loss, for one micro-batch. They limit
models that are too small to keep a GPU busy."""


class Demands:
    """Adds up the seconds that an operation needs of each resource.

    Resources are `gpu`, `host`, `h2d`, `d2h`, `link` (both directions of PCIe together), and, by
    NUMA node or path, `read@`, `write@`, `memory@`, `h2d@`, `d2h@`, `sweep@`, `disk@`, `reads@`
    and `writes@`.
    """

    def __init__(self, rates: Rates, gpus: int = 1, ranks: int = 1) -> None:
        self.rates = rates
        self.gpus = gpus * ranks
        """Number of GPUs that do the same at the same time and share the host's memory."""
        self.ranks = ranks
        """Number of ranks on the host. Each sweeps and stores its own shard, and they share the
        CPUs and the drives."""
        self.seconds: dict[str, float] = defaultdict(float)

    def memory(self, node: int, *, read: float = 0.0, write: float = 0.0, times: int = 1) -> None:
        """Add reads and writes of a memory node, in bytes."""
        rates = self.rates.nodes[node]
        self.seconds[f"read@{node}"] += times * read / rates.read
        self.seconds[f"write@{node}"] += times * write / rates.write
        self.seconds[f"memory@{node}"] += times * (read + write) / rates.total

    def copy_in(self, share: Share, nbytes: float) -> None:
        """Add a copy from a share to the GPU; from NVMe, through host memory."""
        if share.tier is Tier.HBM:
            return
        node = share.node
        if node is None:
            self.disk_read(share.path, nbytes)
            node = self.rates.staging_node
        self.seconds["h2d"] += nbytes / self.rates.h2d
        self.seconds["link"] += nbytes / self.rates.both
        self.seconds[f"h2d@{node}"] += nbytes / self.rates.nodes[node].to_gpu
        self.memory(node, read=nbytes, times=self.gpus)

    def copy_out(self, share: Share, nbytes: float) -> None:
        """Add a copy from the GPU to a share; to NVMe, through host memory."""
        if share.tier is Tier.HBM:
            return
        node = share.node if share.node is not None else self.rates.staging_node
        self.seconds["d2h"] += nbytes / self.rates.d2h
        self.seconds["link"] += nbytes / self.rates.both
        self.seconds[f"d2h@{node}"] += nbytes / self.rates.nodes[node].from_gpu
        self.memory(node, write=nbytes, times=self.gpus)
        if share.path:
            self.disk_write(share.path, nbytes)

    def disk_read(self, path: str, nbytes: float) -> None:
        """Add a read from NVMe into host memory."""
        disk = self.rates.disks[path]
        self._disk(path, "reads", nbytes * self.ranks, disk.read)
        self.memory(self.rates.staging_node, write=nbytes, times=self.ranks)

    def disk_write(self, path: str, nbytes: float) -> None:
        """Add a write from host memory to NVMe."""
        disk = self.rates.disks[path]
        self._disk(path, "writes", nbytes * self.ranks, disk.write)
        self.memory(self.rates.staging_node, read=nbytes, times=self.ranks)

    def _disk(self, path: str, direction: str, nbytes: float, alone: float) -> None:
        """Add disk traffic. Reads and writes share a drive.

        If their combined rate was measured, they share that; otherwise they take turns.
        """
        both = self.rates.disks[path].both
        self.seconds[f"disk@{path}"] += nbytes / (both or alone)
        if both is not None:
            self.seconds[f"{direction}@{path}"] += nbytes / alone

    def sweep(self, share: Share, *, read: float, write: float) -> None:
        """Add a CPU sweep over bytes of one share. What is stored on NVMe is in staging by now."""
        node = share.node if share.node is not None else self.rates.staging_node
        swept = self.ranks * (read + write)
        self.seconds[f"sweep@{node}"] += swept / self.rates.nodes[node].sweep
        self.memory(node, read=read, write=write, times=self.ranks)

    def peers(self, nbytes: float) -> None:
        """Add a collective in which each GPU sends and receives so many bytes.

        Links between GPUs are not described by a machine yet, so they are assumed to be as fast as
        PCIe, and to share it with copies from and to the host.
        """
        self.seconds["h2d"] += nbytes / self.rates.h2d
        self.seconds["d2h"] += nbytes / self.rates.d2h
        self.seconds["link"] += 2 * nbytes / self.rates.both

    def total(self) -> dict[str, float]:
        """Return the seconds of each resource that is needed at all."""
        return {resource: s for resource, s in self.seconds.items() if s > 0}


_WEIGHT, _GRADIENT = (Role.WEIGHT,), (Role.GRADIENT,)


class _BufferWaits:
    """Finds which operation frees the buffer that another one is about to use.

    The schedule lists the release or drop just before the operation that reuses the buffer: a read
    into staging, a fetch of weights, or a backward that produces a gradient.
    """

    def __init__(self) -> None:
        self.released: tuple[int, ...] = ()
        self.weight_dropped: tuple[int, ...] = ()
        self.gradient_dropped: tuple[int, ...] = ()

    def waits(self, at: int, verb: Verb, roles: tuple[Role, ...]) -> tuple[int, ...]:
        """Return what an operation waits for. Call this once for each operation, in order."""
        if verb is Verb.RELEASE:
            self.released = (at,)
        elif verb is Verb.READ:
            return self.released
        elif verb is Verb.DROP:
            if roles == _WEIGHT:
                self.weight_dropped = (at,)
            elif roles == _GRADIENT:
                self.gradient_dropped = (at,)
        elif verb is Verb.FETCH:
            if roles == _WEIGHT:
                return self.weight_dropped
        elif verb is Verb.BACKWARD:
            return self.gradient_dropped
        return ()


@dataclass(frozen=True, slots=True)
class JobBuilder:
    """Builds jobs for schedules of one model, workload, placement and machine."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What to train."""

    placement: Placement
    """Where everything is stored."""

    rates: Rates
    """Speeds of the machine."""

    gpus: int = 1
    """Number of GPUs that share the host and do the same."""

    issued: int = 0
    """Number of elements per piece that the engine issues, if the placement's pieces stand for
    several of those; 0 if they do not."""

    known: DemandCache = field(default_factory=dict)
    """Demands computed before. May be shared with other placements of the same model and workload,
    as long as their homes are alive: homes are compared by identity, because equal homes are mostly
    one object and comparing values would be slow."""

    kinds: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Numbers of the kinds of blocks in `known`. Shared together with it."""

    def jobs(self, schedule: Schedule) -> list[Job]:
        """Return one job for each operation of the schedule."""
        # Most layers differ only in their index, so most demands are computed once.
        known = self.known
        rounds = self.placement.rounds
        kinds, lengths = self._block_kinds(), self._piece_lengths()
        lanes: dict[object, str] = {}
        buffers = _BufferWaits()
        jobs = []
        for at, operation in enumerate(schedule.operations):
            verb, block, roles, _, round, piece, gpu, after = operation
            key: object
            if roles and verb not in COLLECTIVE:
                length = None if piece is None else lengths[block][piece]
                key = (verb, roles, gpu, length, kinds[block])
            else:
                key = (verb, block, round, rounds)
            demands = known.get(key)
            if demands is None:
                demands = known[key] = self._demands(operation)
            kind = (verb, roles, gpu)
            lane = lanes.get(kind)
            if lane is None:
                lane = lanes[kind] = operation.lane
            jobs.append(Job(lane, demands, after + buffers.waits(at, verb, roles)))
        return jobs

    def _demands(self, operation: Operation) -> dict[str, float]:
        if operation.verb not in COMPUTE:
            return self._move_demands(operation)
        demands = self._compute_demands(self._compute_time(), operation)
        # Blocks that take equally long share one mapping: the simulation looks up speeds by the
        # identity of demands.
        return self.known.setdefault((operation.verb, *demands.values()), demands)

    def totals(self, operations: Iterable[Operation]) -> dict[str, float]:
        """Return the summed demands of operations that each cover a whole block."""
        compute = self._compute_time()
        totals: dict[str, float] = defaultdict(float)
        for operation in operations:
            if operation.verb in COMPUTE:
                demands = self._compute_demands(compute, operation)
            else:
                demands = self._move_demands(operation)
            for resource, seconds in demands.items():
                totals[resource] += seconds
        return dict(totals)

    def _compute_time(self) -> ComputeTime:
        return ComputeTime(self.inventory, self.workload, self.placement.rounds, self.rates)

    def _compute_demands(self, compute: ComputeTime, operation: Operation) -> dict[str, float]:
        seconds = compute.seconds(operation)
        if not seconds:  # a round without micro-batches takes no time
            return {}
        if not self.rates.launched:
            return {"gpu": seconds}
        embeds = self.inventory.blocks[operation.block].kind == "embedding"
        each = ISSUING if embeds else LAUNCHING[operation.verb]
        return {"gpu": seconds, "host": compute.micro_batches[operation.round] * each}

    def _block_kinds(self) -> list[int]:
        """Return, for each block, a number that is equal for blocks with the same demands."""
        # Numbers are faster to hash than the tuples they stand for.
        return [
            self.kinds.setdefault((model.flat_elements(True), *map(id, at.homes)), len(self.kinds))
            for model, at in zip(self.inventory.blocks, self.placement.blocks, strict=True)
        ]

    def _piece_lengths(self) -> list[list[int]]:
        """Return, for each block, the number of elements of each piece."""
        step = self.placement.piece_elements
        return [
            [stop - start for t in (True, False) for start, stop in block.pieces(step, trainable=t)]
            for block in self.inventory.blocks
        ]

    def _move_demands(self, operation: Operation) -> dict[str, float]:
        """Return the demands of an operation that does not compute; empty if it moves nothing."""
        demands = self._traffic_demands(operation)
        return demands | {"host": self._issues(operation) * ISSUING} if demands else demands

    def _issues(self, operation: Operation) -> int:
        """Return how many pieces the engine issues for this operation."""
        if operation.piece is None or not self.issued:
            return 1
        block = self.inventory.blocks[operation.block]
        start, stop, _ = piece_span(block, operation.piece, self.placement)
        return -(-(stop - start) // self.issued)

    def _traffic_demands(self, operation: Operation) -> dict[str, float]:
        if operation.verb in (Verb.DROP, Verb.RELEASE):
            return {}
        if operation.verb in COLLECTIVE:
            return self._collective_demands(operation)
        traffic = Traffic.of(self.inventory, self.workload, self.placement)
        if operation.verb is Verb.SWEEP and operation.gpu:
            return {"gpu": traffic.gpu_sweep_nbytes(operation) / self.rates.hbm}
        demands = Demands(self.rates, self.gpus, self.workload.world)
        for role, share, nbytes in traffic.stored_parts(operation):
            match operation.verb:
                case Verb.SWEEP:
                    written = 0.0 if role is Role.GRADIENT else nbytes
                    demands.sweep(share, read=nbytes, write=written)
                case Verb.FETCH if operation.piece is not None or role is Role.WEIGHT:
                    demands.copy_in(self._in_staging(share), nbytes)
                case Verb.FETCH:
                    demands.copy_in(share, nbytes)
                case Verb.OFFLOAD:
                    demands.copy_out(share, nbytes)
                case Verb.READ if share.path:
                    demands.disk_read(share.path, nbytes)
                case Verb.WRITE if share.path:
                    demands.disk_write(share.path, nbytes)
        return demands.total()

    def _collective_demands(self, operation: Operation) -> dict[str, float]:
        """Return the demands of what all ranks do together."""
        if operation.verb is Verb.MEET:
            return {"host": ISSUING}
        demands, world = Demands(self.rates, self.gpus), self.workload.world
        block, formats = self.inventory.blocks[operation.block], self.workload.formats()
        if operation.verb is Verb.GATHER:
            resident = self.placement.blocks[operation.block].all_on(Role.WEIGHT, Tier.HBM)
            elements = block.flat_elements(True) + (0 if resident else block.flat_elements(False))
            nbytes = formats.nbytes(Role.WEIGHT, elements)
        else:
            # The head's gradients are sums over chunks of the loss, in fp32, and it adds to a tied
            # embedding as well.
            head = block.kind == "head"
            lends = head and self.inventory.tied
            tied = self.inventory.blocks[0].flat_elements(True) if lends else 0
            width = 4 if head else formats.weight_format.weight
            waves = micro_batches_by_round(self.workload, self.placement.rounds)[operation.round]
            nbytes = waves * width * (block.flat_elements(True) + tied)
        demands.peers(nbytes * (world - 1) / world)
        return demands.total()

    def _in_staging(self, share: Share) -> Share:
        """Return where a fetch finds a weight: a read, or the sweep, has put it into staging."""
        if not share.path:
            return share
        return Share(tier=Tier.DRAM, nbytes=share.nbytes, node=self.rates.staging_node)
