"""Turn a schedule into timed jobs: how many seconds of which resource each operation needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.model.inventory import Inventory
from penstock.plan.buffers import micro_batches_by_round
from penstock.plan.lifetimes import operation_span
from penstock.plan.placement import Placement
from penstock.plan.schedule import COLLECTIVE, COMPUTE, Operation, Schedule, Verb
from penstock.plan.seats import ALONE, Ranks
from penstock.plan.traffic import Traffic, writes
from penstock.plan.workload import Workload
from penstock.planner.cost.compute import ComputeTime
from penstock.planner.cost.demands import Demands, in_staging
from penstock.planner.cost.flops import muon_operations
from penstock.planner.cost.rank_demands import rank_demands
from penstock.planner.cost.rates import Rates
from penstock.planner.cost.simulation import Job
from penstock.roles import TRAINED, Role

DemandCache = dict[object, dict[str, float]]
"""Demands of operations computed before, by what they depend on."""

ISSUING = 0.3e-3
"""Host seconds to issue an operation that moves or sweeps. All threads that issue share the
interpreter's lock. Measured: 0.9 ms for a piece that is read, swept and written."""

LAUNCHING = {Verb.FORWARD: 2e-3, Verb.BACKWARD: 6e-3, Verb.LOSS: 4e-3}
"""Host seconds to launch the kernels of a layer, or of the loss, for one micro-batch. They limit
models that are too small to keep a GPU busy."""


WRITING = 0.36
"""How long a CPU sweep takes for a byte that it writes, relative to one that it reads. Of 3.086 B
parameters on an H200 machine, 7.7 billion per second were swept without their moments (14 bytes
read, 4 written), 8.8 billion moments without weights (10 and 8), and 6.5 billion as a whole (14 and
12)."""

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
        self.states_dropped: tuple[int, ...] = ()

    def waits(self, at: int, verb: Verb, roles: tuple[Role, ...], gpu: bool) -> tuple[int, ...]:
        """Return what an operation waits for. Call this once for each operation, in order."""
        if gpu:
            if verb is Verb.DROP:
                self.states_dropped = (at,)
            return self.states_dropped if verb is Verb.FETCH else ()
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

    ranks: Ranks = ALONE
    """The ranks, and what they share. All of them do the same at the same time."""

    issued: int = 0
    """Number of elements per piece that the engine issues, if the placement's pieces stand for
    several of those; 0 if they do not."""

    issued_states: int = 0
    """The same for pieces of states that the GPU sweeps."""

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
        counts = micro_batches_by_round(self.workload, rounds)
        head = len(kinds) - 1
        lanes: dict[object, str] = {}
        buffers = _BufferWaits()
        jobs = []
        for at, operation in enumerate(schedule.operations):
            verb, block, roles, _, round, piece, gpu, after = operation
            key: object
            if verb in COLLECTIVE:
                key = (verb, kinds[block], block == head, counts[round])
            elif roles:
                length = None if piece is None else lengths[block][piece]
                key = (verb, roles, gpu, length, kinds[block])
            else:
                at_block = self.placement.blocks[block]
                key = (verb, block, round, rounds, at_block.kept, at_block.attention)
            demands = known.get(key)
            if demands is None:
                demands = known[key] = self._demands(operation)
            kind = (verb, roles, gpu, piece is None)
            lane = lanes.get(kind)
            if lane is None:
                lane = lanes[kind] = operation.lane
            jobs.append(Job(lane, demands, after + buffers.waits(at, verb, roles, gpu)))
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
        return ComputeTime(self.inventory, self.workload, self.placement, self.rates)

    def _compute_demands(self, compute: ComputeTime, operation: Operation) -> dict[str, float]:
        seconds = compute.seconds(operation)
        if not seconds:  # a round without micro-batches takes no time
            return {}
        if not self.rates.launched:
            return {"gpu": seconds}
        embeds = self.inventory.blocks[operation.block].kind == "embedding"
        each = ISSUING if embeds else LAUNCHING[operation.verb]
        host = compute.micro_batches[operation.round] * each
        host -= compute.kept_passes(operation) * LAUNCHING[Verb.FORWARD]
        return {"gpu": seconds, "host": host}

    def _block_kinds(self) -> list[int]:
        """Return, for each block, a number that is equal for blocks with the same demands."""
        # Numbers are faster to hash than the tuples they stand for.
        return [
            self.kinds.setdefault((model.flat_elements(True), *map(id, at.homes)), len(self.kinds))
            for model, at in zip(self.inventory.blocks, self.placement.blocks, strict=True)
        ]

    def _piece_lengths(self) -> list[list[int]]:
        """Return, for each block, the number of elements of each piece."""
        step, gpu_step = self.placement.piece_elements, self.placement.gpu_piece_elements
        steps = [gpu_step if at.streams_states else step for at in self.placement.blocks]
        return [
            [stop - start for t in (True, False) for start, stop in block.pieces(each, trainable=t)]
            for block, each in zip(self.inventory.blocks, steps, strict=True)
        ]

    def _move_demands(self, operation: Operation) -> dict[str, float]:
        """Return the demands of an operation that does not compute; empty if it moves nothing."""
        demands = self._traffic_demands(operation)
        return demands | {"host": self._issues(operation) * ISSUING} if demands else demands

    def _issues(self, operation: Operation) -> int:
        """Return how many pieces the engine issues for this operation."""
        issued = self.issued_states if operation.gpu else self.issued
        if operation.piece is None or not issued:
            return 1
        block = self.inventory.blocks[operation.block]
        start, stop, _ = operation_span(block, operation, self.placement)
        return -(-(stop - start) // issued)

    def _traffic_demands(self, operation: Operation) -> dict[str, float]:
        if operation.verb in (Verb.DROP, Verb.RELEASE):
            return {}
        if operation.verb is Verb.MEET:
            return {"host": ISSUING}
        if operation.verb in COLLECTIVE:
            return rank_demands(
                operation, self.inventory, self.workload, self.placement, self.rates, self.ranks
            )
        traffic = Traffic.of(self.inventory, self.workload, self.placement)
        if operation.verb is Verb.SWEEP and traffic.updates_whole(operation.block):
            return self._update_demands(operation, traffic)
        if operation.verb is Verb.SWEEP and operation.roles != TRAINED:
            return self._part_demands(operation, traffic)
        at = self.placement.blocks[operation.block]
        # The CPU updates the moments of blocks in host memory whose weights the GPU updates.
        on_gpu = operation.gpu or (at.sweep == "gpu" and not at.streams_states)
        if operation.verb is Verb.SWEEP and on_gpu:
            return {"gpu": traffic.gpu_sweep_nbytes(operation) / self.rates.hbm}
        demands = Demands(self.rates, self.ranks)
        for role, share, nbytes in traffic.stored_parts(operation):
            match operation.verb:
                case Verb.SWEEP:
                    written = nbytes if writes(operation, role) else 0.0
                    demands.sweep(share, read=nbytes, write=written)
                case Verb.FETCH if operation.piece is not None or role is Role.WEIGHT:
                    demands.copy_in(in_staging(share, self.rates), nbytes)
                case Verb.FETCH:
                    demands.copy_in(share, nbytes)
                case Verb.OFFLOAD:
                    demands.copy_out(share, nbytes)
                case Verb.READ if share.path:
                    demands.disk_read(share.path, nbytes)
                case Verb.WRITE if share.path:
                    demands.disk_write(share.path, nbytes)
        return demands.total()

    def _part_demands(self, operation: Operation, traffic: Traffic) -> dict[str, float]:
        """Return the demands of a CPU sweep that updates the weights only, or the moments only.

        Machine files have the rate of a whole sweep. The cores take longer to read than to write,
        so a part counts by its reads, and by its writes as far as they matter.
        """
        whole = operation._replace(roles=TRAINED)
        of_part, of_whole = (
            sum(p.nbytes * (1 + WRITING * writes(each, p.role)) for p in traffic.stored_parts(each))
            for each in (operation, whole)
        )
        demands = Demands(self.rates, self.ranks)
        for role, share, nbytes in traffic.stored_parts(operation):
            written = nbytes if writes(operation, role) else 0.0
            node = in_staging(share, self.rates).node
            assert node is not None, "parts are swept in host memory only"
            demands.memory(node, read=nbytes, write=written)
        sweeping = {
            resource: seconds * of_part / of_whole
            for resource, seconds in self._traffic_demands(whole).items()
            if resource.startswith("sweep@")
        }
        return demands.total() | sweeping

    def _update_demands(self, operation: Operation, traffic: Traffic) -> dict[str, float]:
        """Return the demands of an update of whole tensors, which the device computes."""
        demands = Demands(self.rates, self.ranks)
        for role, share, nbytes in traffic.stored_parts(operation):
            read, written = traffic.update_passes(role)
            demands.seconds["gpu"] += (read + written) * nbytes / self.rates.hbm
            home = in_staging(share, self.rates)  # a read has put what is on NVMe there
            demands.copy_in(home, read * nbytes)
            demands.copy_out(home, written * nbytes)
        block = self.inventory.blocks[operation.block]
        if self.workload.optimizer == "muon":
            start, stop = 0, block.shard_elements(True)
            if operation.piece is not None:
                start, stop, _ = operation_span(block, operation, self.placement)
            flops = muon_operations(block, start, stop)
            demands.seconds["gpu"] += flops / self.rates.block_flops
        return demands.total()
