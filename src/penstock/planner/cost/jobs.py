"""A schedule as timed work: how many seconds of what each operation asks for. Room: decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.model.inventory import Inventory
from penstock.plan.lifetimes import piece_span
from penstock.plan.placement import Placement, Share
from penstock.plan.schedule import COMPUTE, Operation, Schedule, Verb
from penstock.plan.workload import Workload
from penstock.planner.cost.compute import Computation
from penstock.planner.cost.rates import Rates
from penstock.planner.cost.simulation import Job
from penstock.roles import STATE, TRAINED, Role
from penstock.tiers import Tier

Known = dict[object, dict[str, float]]
"""What kinds of operations ask for."""

ISSUING = 0.3e-3
"""Seconds of the host to issue an operation that moves or sweeps. All threads that do share the
interpreter's lock. Measured: 0.9 ms for a piece that is read, swept and written."""

LAUNCHING = {Verb.FORWARD: 2e-3, Verb.BACKWARD: 6e-3, Verb.LOSS: 4e-3}
"""Seconds of the host to launch a layer's kernels for a micro-batch, and the loss': what a model
takes that is too small to keep a GPU busy."""


class Demands:
    """Adds up what an operation asks of a machine."""

    def __init__(self, rates: Rates, gpus: int = 1) -> None:
        self.rates = rates
        self.gpus = gpus
        """GPUs that do the same at the same time and share the host's memory."""
        self.seconds: dict[str, float] = defaultdict(float)

    def memory(self, node: int, *, read: float = 0.0, write: float = 0.0, times: int = 1) -> None:
        rates = self.rates.nodes[node]
        self.seconds[f"read@{node}"] += times * read / rates.read
        self.seconds[f"write@{node}"] += times * write / rates.write
        self.seconds[f"memory@{node}"] += times * (read + write) / rates.total

    def copy_in(self, shares: Iterable[Share], part: float = 1.0) -> None:
        """From the host to the GPU, through the host where it rests on NVMe."""
        for share in shares:
            nbytes = part * share.nbytes
            if share.tier is Tier.HBM:
                continue
            node = share.node
            if node is None:
                self.disk_read(share.path, nbytes)
                node = self.rates.staging_node
            self.seconds["h2d"] += nbytes / self.rates.h2d
            self.seconds["link"] += nbytes / self.rates.both
            self.seconds[f"h2d@{node}"] += nbytes / self.rates.nodes[node].to_gpu
            self.memory(node, read=nbytes, times=self.gpus)

    def copy_out(self, shares: Iterable[Share], part: float = 1.0) -> None:
        for share in shares:
            nbytes = part * share.nbytes
            if share.tier is Tier.HBM:
                continue
            node = share.node if share.node is not None else self.rates.staging_node
            self.seconds["d2h"] += nbytes / self.rates.d2h
            self.seconds["link"] += nbytes / self.rates.both
            self.seconds[f"d2h@{node}"] += nbytes / self.rates.nodes[node].from_gpu
            self.memory(node, write=nbytes, times=self.gpus)
            if share.path:
                self.disk_write(share.path, nbytes)

    def disk_read(self, path: str, nbytes: float) -> None:
        disk = self.rates.disks[path]
        self._disk(path, "reads", nbytes, disk.read)
        self.memory(self.rates.staging_node, write=nbytes)

    def disk_write(self, path: str, nbytes: float) -> None:
        disk = self.rates.disks[path]
        self._disk(path, "writes", nbytes, disk.write)
        self.memory(self.rates.staging_node, read=nbytes)

    def _disk(self, path: str, way: str, nbytes: float, alone: float) -> None:
        """Its two directions share a drive: they take turns, or reach together what was measured
        of both at once."""
        both = self.rates.disks[path].both
        self.seconds[f"disk@{path}"] += nbytes / (both or alone)
        if both is not None:
            self.seconds[f"{way}@{path}"] += nbytes / alone

    def sweep(self, share: Share, *, read: float, write: float) -> None:
        """The CPU's pass over bytes of one place; from NVMe they are in staging by now."""
        node = share.node if share.node is not None else self.rates.staging_node
        self.seconds[f"sweep@{node}"] += (read + write) / self.rates.nodes[node].sweep
        self.memory(node, read=read, write=write)

    def total(self) -> dict[str, float]:
        return {resource: s for resource, s in self.seconds.items() if s > 0}


_WEIGHT, _GRADIENT = (Role.WEIGHT,), (Role.GRADIENT,)


class _Buffers:
    """Who waits for a buffer. The schedule lists what is given back just before what takes its
    place: a piece read into staging, a block's weights, the gradient that a backward makes."""

    def __init__(self) -> None:
        self.released: tuple[int, ...] = ()
        self.dropped: dict[tuple[Role, ...], tuple[int, ...]] = {}

    def waits(self, at: int, operation: Operation) -> tuple[int, ...]:
        """What else it must wait for. Asked of each operation, in the order listed."""
        match operation.verb:
            case Verb.RELEASE:
                self.released = (at,)
            case Verb.DROP:
                self.dropped[operation.roles] = (at,)
            case Verb.READ:
                return self.released
            case Verb.FETCH if operation.roles == _WEIGHT:
                return self.dropped.get(_WEIGHT, ())
            case Verb.BACKWARD:
                return self.dropped.get(_GRADIENT, ())
        return ()


@dataclass(frozen=True, slots=True)
class Translator:
    """Everything an operation's demands depend on."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is done."""

    placement: Placement
    """Where it rests."""

    rates: Rates
    """How fast the machine is."""

    gpus: int = 1
    """GPUs that share the host and do the same."""

    issued: int = 0
    """Elements of a piece as the engine issues them, where those of the placement stand for
    several of them; 0: they do not."""

    known: Known = field(default_factory=dict)
    """Demands found before. May be kept for other placements of the same model and work, as long
    as their homes are: equal homes are mostly one object, and are told apart by that."""

    def jobs(self, schedule: Schedule) -> list[Job]:
        # Layers are alike: what differs is only which block, so most demands are computed once.
        known = self.known
        compute = Computation(self.inventory, self.workload, self.placement.rounds, self.rates)
        kinds, lengths = self._kinds(), self._lengths()
        lanes: dict[object, str] = {}
        buffers = _Buffers()
        made = []
        for at, operation in enumerate(schedule.operations):
            verb, block, roles, _, round, piece, gpu, after = operation
            key: object
            if verb in COMPUTE:
                key = (verb, block, round, self.placement.rounds)
            else:
                key = (verb, roles, gpu, piece is not None and lengths[block][piece], kinds[block])
            demands = known.get(key)
            if demands is None:
                if verb in COMPUTE:  # of all blocks that take as long, one mapping
                    demands = self._computed(compute, operation)
                    demands = known.setdefault((verb, *demands.values()), demands)
                else:
                    demands = self._demands(operation)
                known[key] = demands
            kind = (verb, roles, gpu)
            lane = lanes.get(kind)
            if lane is None:
                lane = lanes[kind] = operation.lane
            made.append(Job(lane, demands, after + buffers.waits(at, operation)))
        return made

    def totals(self, operations: Iterable[Operation]) -> dict[str, float]:
        """All that some operations, each on a whole block, ask for."""
        compute = Computation(self.inventory, self.workload, self.placement.rounds, self.rates)
        found: dict[str, float] = defaultdict(float)
        for operation in operations:
            if operation.verb in COMPUTE:
                demands = self._computed(compute, operation)
            else:
                demands = self._demands(operation)
            for resource, seconds in demands.items():
                found[resource] += seconds
        return dict(found)

    def _computed(self, compute: Computation, operation: Operation) -> dict[str, float]:
        seconds = compute.seconds(operation)
        if not seconds:  # a round without a micro-batch is done in no time
            return {}
        if not self.rates.launched:
            return {"gpu": seconds}
        embeds = self.inventory.blocks[operation.block].kind == "embedding"
        each = ISSUING if embeds else LAUNCHING[operation.verb]
        return {"gpu": seconds, "host": compute.micro_batches[operation.round] * each}

    def _kinds(self) -> list[tuple[int, ...]]:
        """Per block, what tells its homes from others."""
        return [
            (model.flat_elements(True), *map(id, at.homes))
            for model, at in zip(self.inventory.blocks, self.placement.blocks, strict=True)
        ]

    def _lengths(self) -> list[list[int]]:
        """Per block, the elements of each piece."""
        step = self.placement.piece_elements
        return [
            [stop - start for t in (True, False) for start, stop in block.pieces(step, trainable=t)]
            for block in self.inventory.blocks
        ]

    def _demands(self, operation: Operation) -> dict[str, float]:
        """Nothing, where nothing has to be moved."""
        found = self._moved(operation)
        return found | {"host": self._issues(operation) * ISSUING} if found else found

    def _issues(self, operation: Operation) -> int:
        if operation.piece is None or not self.issued:
            return 1
        block = self.inventory.blocks[operation.block]
        start, stop, _ = piece_span(block, operation.piece, self.placement)
        return -(-(stop - start) // self.issued)

    def _moved(self, operation: Operation) -> dict[str, float]:
        if operation.verb in (Verb.DROP, Verb.RELEASE):
            return {}
        part = self._part(operation)
        demands = Demands(self.rates, self.gpus)
        if operation.verb is Verb.SWEEP:
            if operation.gpu:
                return {"gpu": self._gpu_sweep_seconds(operation.block)}
            self._sweep(demands, operation, part)
            return demands.total()
        block = self.placement.blocks[operation.block]
        shares = [s for r in operation.roles if (home := block.home(r)) for s in home.shares]
        match operation.verb:
            case Verb.FETCH if operation.piece is not None or Role.WEIGHT in operation.roles:
                demands.copy_in([_staged(share, self.rates) for share in shares], part)
            case Verb.FETCH:
                demands.copy_in(shares, part)
            case Verb.DRAIN:
                demands.copy_out(shares, part)
            case Verb.READ:
                for share in (s for s in shares if s.path):
                    demands.disk_read(share.path, part * share.nbytes)
            case Verb.WRITE:
                for share in (s for s in shares if s.path):
                    demands.disk_write(share.path, part * share.nbytes)
        return demands.total()

    def _part(self, operation: Operation) -> float:
        """The share of the block that one piece is."""
        if operation.piece is None:
            return 1.0
        block = self.inventory.blocks[operation.block]
        start, stop, trained = piece_span(block, operation.piece, self.placement)
        if operation.roles == (Role.WEIGHT,):  # a weight's buffer holds frozen tensors too
            return (stop - start) / (block.flat_elements(True) + block.flat_elements(False))
        assert trained
        return (stop - start) / block.flat_elements(True)

    def _sweep(self, demands: Demands, operation: Operation, part: float) -> None:
        block = self.placement.blocks[operation.block]
        model = self.inventory.blocks[operation.block]
        trained = model.flat_elements(True)
        whole = trained + model.flat_elements(False)
        for role in TRAINED:
            home = block.home(role)
            for share in home.shares if home else ():
                scale = trained / whole if role is Role.WEIGHT else 1.0
                nbytes = part * scale * share.nbytes
                back = 0.0 if role is Role.GRADIENT else nbytes
                demands.sweep(share, read=nbytes, write=back)

    def _gpu_sweep_seconds(self, block: int) -> float:
        at = self.placement.blocks[block]
        moved = sum(2 * home.nbytes for r in (Role.WEIGHT, *STATE) if (home := at.home(r)))
        gradient = at.home(Role.GRADIENT)
        return (moved + (gradient.nbytes if gradient else 0)) / self.rates.hbm


def _staged(share: Share, rates: Rates) -> Share:
    """Weights on NVMe are fetched from staging: a read, or the sweep, has put them there."""
    if not share.path:
        return share
    return Share(tier=Tier.DRAM, nbytes=share.nbytes, node=rates.staging_node)
