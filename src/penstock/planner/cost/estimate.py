"""Estimate what a step costs: seconds, phases, how busy each resource is, and what limits it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from penstock.model.inventory import Inventory
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import Placement
from penstock.plan.schedule import Operation, Schedule, Verb
from penstock.plan.seats import ALONE, Ranks
from penstock.plan.workload import Workload
from penstock.planner.cost.jobs import DemandCache, JobBuilder
from penstock.planner.cost.rates import Rates
from penstock.planner.cost.simulation import (
    Job,
    JobSpan,
    SpeedCache,
    critical_path,
    simulate,
    simulate_seconds,
)
from penstock.roles import MOMENTS, STATE, TRAINED, WEIGHTS, Role
from penstock.tiers import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The estimated cost of one step."""

    step_seconds: float
    """Seconds from the start of one step to the start of the next."""

    tokens_per_second: float
    """Training throughput."""

    phases: Mapping[str, float]
    """Seconds of each phase. Forward includes the optimizer sweeps; backward is the rest."""

    busy: Mapping[str, float]
    """Fraction of the step during which each resource is busy."""

    bounds: Mapping[str, float]
    """Seconds of the critical path by the resource that limits them, most first."""

    spans: tuple[JobSpan, ...]
    """When each operation of the schedule runs."""

    schedule: Schedule
    """The operations."""

    @property
    def bound_by(self) -> str:
        """The resource that limits most of the critical path."""
        return next(iter(self.bounds))


def estimate(
    inventory: Inventory,
    workload: Workload,
    placement: Placement,
    rates: Rates,
    *,
    schedule: Schedule | None = None,
    ranks: Ranks | None = None,
) -> Cost:
    """Estimate the cost of one step. The result depends on nothing but the arguments.

    Args:
        inventory: The model.
        workload: What to train.
        placement: Where everything is stored.
        rates: Speeds of the machine.
        schedule: The schedule of the placement, if it has been built already.
        ranks: The ranks, and what they share; by default, they share everything but their GPUs.
    """
    inventory = workload.stored(inventory)
    schedule = schedule or step_schedule(inventory, placement)
    node = placement.host_node
    if node is not None and node in rates.nodes:  # a plan file may name another node than `rates`
        rates = replace(rates, staging_node=node)
    ranks = ranks or Ranks(world=workload.world)
    jobs = JobBuilder(inventory, workload, placement, rates, ranks).jobs(schedule)
    spans = simulate(jobs)
    seconds = max(span.end for span in spans)
    forward_end = max(
        (s.end for s, o in zip(spans, schedule.operations, strict=True)
         if o.phase == "forward" and o.verb == "forward" and o.round == 0),
        default=0.0,
    )  # fmt: skip
    return Cost(
        step_seconds=seconds,
        tokens_per_second=workload.tokens / seconds,
        phases={"forward": forward_end, "backward": seconds - forward_end},
        busy=busy_shares(jobs, seconds),
        bounds=bounds(jobs, spans),
        spans=tuple(spans),
        schedule=schedule,
    )


def busy_shares(jobs: Sequence[Job], seconds: float) -> dict[str, float]:
    """Return the fraction of the step during which each resource is busy."""
    totals: dict[str, float] = defaultdict(float)
    for job in jobs:
        for resource, wanted in job.demands.items():
            totals[resource] += wanted
    return {resource: total / seconds for resource, total in sorted(totals.items())}


def bounds(jobs: Sequence[Job], spans: Sequence[JobSpan]) -> dict[str, float]:
    """Divide the critical path among resources: each job counts for the one it needs most."""
    totals: dict[str, float] = defaultdict(float)
    for i in critical_path(spans):
        if jobs[i].demands:
            totals[_bottleneck(jobs[i].demands)] += spans[i].end - spans[i].start
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _bottleneck(demands: Mapping[str, float]) -> str:
    return max(demands, key=lambda resource: (demands[resource], resource))


@dataclass(slots=True)
class StepTimer:
    """Times many placements of one model and workload on one machine.

    It computes once what the placements have in common. It identifies homes by `id`, so it must
    not outlive the homes of the placements it has timed.
    """

    inventory: Inventory
    """The model."""

    workload: Workload
    """What to train."""

    rates: Rates
    """Speeds of the machine."""

    issued: int = 0
    """See `JobBuilder.issued`."""

    issued_states: int = 0
    """See `JobBuilder.issued_states`."""

    ranks: Ranks = ALONE
    """The ranks, and what they share."""

    _demands: DemandCache = field(init=False, default_factory=dict)
    _home_kinds: dict[tuple[int, ...], int] = field(init=False, default_factory=dict)
    _speeds: SpeedCache = field(init=False, default_factory=dict)
    _required: dict[tuple[int, ...], _RequiredWork] = field(init=False, default_factory=dict)

    def seconds(self, placement: Placement, schedule: Schedule) -> float:
        """Return the same as `estimate(...).step_seconds`."""
        return simulate_seconds(self._builder(placement).jobs(schedule), self._speeds)

    def lower_bound(self, placement: Placement) -> float:
        """Return a time that no schedule of the placement can beat, without building one.

        The loss divides the step: some work must end before it starts, and some can only start
        with it. So a step takes as long as the busiest resource works before the loss, plus as long
        as the busiest resource, maybe another one, works from there on.
        """
        works = list(self._required_work(placement))
        sums: dict[str, _Seconds] = {}
        for work, count in works:
            for resource, seconds in work.by_resource.items():
                if resource not in sums:
                    sums[resource] = _Seconds()
                sums[resource].add(seconds, count)
        # The read of a piece waits until an earlier piece is written back and leaves its buffer. So
        # all writes but the last few end before the last sweep, if every piece is written back.
        written_before = all(work.writes_all for work, _ in works)
        busiest = busiest_before = busiest_after = 0.0
        for resource, total in sums.items():
            if total.again:
                # Layers that are still in a slot when backward starts are not fetched again.
                kept = max(work.of(resource).again for work, _ in works)
                total.after += max(0.0, total.again - placement.slots * kept)
            busiest = max(busiest, total.before + total.after + total.either + total.write)
            if total.write and written_before:
                last = max(work.piece_write(resource, placement) for work, _ in works)
                total.before += max(0.0, total.write - placement.pieces_staged * last)
            busiest_before = max(busiest_before, total.before)
            busiest_after = max(busiest_after, total.after)
        return max(busiest, busiest_before + busiest_after)

    def _required_work(self, placement: Placement) -> Iterator[tuple[_RequiredWork, int]]:
        """Yield the required work of a block of each kind, and the number of such blocks."""
        alike: dict[tuple[int, ...], list[int]] = {}
        kinds, rounds = self.inventory.kinds, placement.rounds
        last_layer = len(placement.blocks) - 2
        for block, at in enumerate(placement.blocks):
            # What the last layers save may overlap the loss: see `_required_work`.
            gpu = at.sweep == "gpu"
            ends = min(2, last_layer - block) if at.attention else block == last_layer
            saved = (at.kept, at.attention, at.late_moments)
            key = (kinds[block], ends, rounds, *saved, gpu, *map(id, at.homes))
            alike.setdefault(key, []).append(block)
        for key, blocks in alike.items():
            work = self._required.get(key)
            if work is None:
                builder = self._builder(placement)
                work = self._required[key] = _required_work(builder, blocks[0])
            yield work, len(blocks)

    def compute_seconds(self, placement: Placement) -> float:
        """Return how long the GPU computes and the host launches, without optimizer sweeps.

        No step is shorter, wherever anything is stored.
        """
        blocks = range(len(placement.blocks))
        parts = (_compute_operations(self.inventory, i, placement.rounds) for i in blocks)
        return max(self._builder(placement).totals(chain.from_iterable(parts)).values())

    def sweep_seconds(self, placement: Placement, block: int) -> tuple[float, float]:
        """Return how long a sweep of a block takes on the CPU, and through the GPU, if alone.

        With late moments, that is the sweep before forward.
        """
        at = placement.blocks[block]
        swept = WEIGHTS if at.late_moments else TRAINED
        on_cpu = [Operation(Verb.SWEEP, block, swept, "forward")]
        on_gpu = [
            Operation(Verb.FETCH, block, TRAINED, "forward", gpu=True),
            Operation(Verb.OFFLOAD, block, at.swept_on_gpu, "forward", gpu=True),
        ]
        builder = self._builder(placement)
        cpu, gpu = (max(builder.totals(each).values()) for each in (on_cpu, on_gpu))
        return cpu, gpu

    def _builder(self, placement: Placement) -> JobBuilder:
        parts = (self.inventory, self.workload, placement, self.rates, self.ranks)
        return JobBuilder(
            *parts, issued=self.issued, issued_states=self.issued_states,
            known=self._demands, kinds=self._home_kinds,
        )  # fmt: skip


@dataclass(slots=True)
class _Seconds:
    """Seconds that one resource works, by when the work can be done."""

    before: float = 0.0
    """Work that must end before the loss can start."""

    after: float = 0.0
    """Work that cannot start before the loss does, the loss included."""

    either: float = 0.0
    """Work that may be on either side."""

    write: float = 0.0
    """Writes to NVMe after the optimizer sweep."""

    again: float = 0.0
    """Fetches of streamed layers for their backward, if all of them are fetched again."""

    def add(self, other: _Seconds, count: int) -> None:
        """Add another resource's seconds a number of times."""
        self.before += count * other.before
        self.after += count * other.after
        self.either += count * other.either
        self.write += count * other.write
        self.again += count * other.again


_NONE = _Seconds()


class _RequiredWork(NamedTuple):
    """What one block needs in any schedule."""

    by_resource: Mapping[str, _Seconds]
    """Seconds of each resource."""

    elements: int
    """Number of trainable elements."""

    writes_all: bool
    """Whether everything of the block that passes through staging is written back."""

    def of(self, resource: str) -> _Seconds:
        """Return the seconds of one resource."""
        return self.by_resource.get(resource, _NONE)

    def piece_write(self, resource: str, placement: Placement) -> float:
        """Return the seconds of a resource that it takes to write the largest piece."""
        part = min(1.0, placement.piece_elements / max(1, self.elements))
        return part * self.of(resource).write


def _required_work(builder: JobBuilder, block: int) -> _RequiredWork:
    """Sum up the operations on a block that no schedule can avoid."""
    at, inventory = builder.placement.blocks[block], builder.inventory
    model, last_layer = inventory.blocks[block], len(inventory.blocks) - 2
    before: list[Operation] = []
    after: list[Operation] = []
    either: list[Operation] = []
    write: list[Operation] = []
    again: list[Operation] = []
    staged = tuple(role for role in TRAINED if at.touches(role, Tier.NVME))
    swept = (Role.WEIGHT, *STATE)
    back = tuple(role for role in swept if role in staged)
    if at.sweep != "none":
        # A block is swept before its forward, or before the loss if it is the head.
        on_gpu = at.sweep == "gpu"
        roles = WEIGHTS if at.late_moments and not on_gpu else TRAINED
        before.append(Operation(Verb.SWEEP, block, roles, "forward", gpu=on_gpu))
        if at.late_moments:
            either.append(Operation(Verb.SWEEP, block, MOMENTS, "backward"))
        if at.streams_states:
            before.append(Operation(Verb.FETCH, block, TRAINED, "forward", gpu=True))
            before.append(Operation(Verb.OFFLOAD, block, at.swept_on_gpu, "forward", gpu=True))
        before.append(Operation(Verb.READ, block, staged, "forward"))
        if at.late_moments and staged:
            late = tuple(role for role in staged if role not in WEIGHTS)
            either.append(Operation(Verb.READ, block, late, "backward"))
            moments = tuple(role for role in back if role in MOMENTS)
            either.append(Operation(Verb.WRITE, block, moments, "backward"))
            back = tuple(role for role in back if role in WEIGHTS)
        write.append(Operation(Verb.WRITE, block, back, "forward"))
    if at.home(Role.WEIGHT):
        before.append(Operation(Verb.FETCH, block, (Role.WEIGHT,), "forward"))
    streamed = not at.all_on(Role.WEIGHT, Tier.HBM) or at.is_split
    several = builder.ranks.world > 1
    if several and at.home(Role.WEIGHT) and (streamed or at.sweep != "none"):
        before.append(Operation(Verb.GATHER, block, (Role.WEIGHT,), "forward"))
    if model.kind == "layer" and streamed and not at.kept:
        again.append(Operation(Verb.FETCH, block, (Role.WEIGHT,), "backward"))
        if several:
            again.append(Operation(Verb.GATHER, block, (Role.WEIGHT,), "backward"))
        if Role.WEIGHT in staged or at.touches(Role.FROZEN, Tier.NVME):
            again.append(Operation(Verb.READ, block, (Role.WEIGHT,), "backward"))
    for operation in _compute_operations(inventory, block, builder.placement.rounds):
        first_forward = operation.verb is Verb.FORWARD and operation.round == 0
        (before if first_forward else after).append(operation)
    for round in range(builder.placement.rounds):
        if at.home(Role.GRADIENT) and several:
            after.append(Operation(Verb.EXCHANGE, block, (Role.GRADIENT,), "backward", round))
        if at.home(Role.GRADIENT):
            after.append(Operation(Verb.OFFLOAD, block, (Role.GRADIENT,), "backward", round))
        if at.home(Role.ACTIVATION):
            # The last layer's activation may leave while the loss is computed, and be fetched
            # before the loss starts. All others leave earlier and return later.
            offload = Operation(Verb.OFFLOAD, block, (Role.ACTIVATION,), "forward", round)
            fetch = Operation(Verb.FETCH, block, (Role.ACTIVATION,), "backward", round)
            inner = block < last_layer
            (before if inner and round == 0 else either).append(offload)
            (after if inner else either).append(fetch)
        if at.home(Role.ATTENTION):
            # Those of the last two layers may leave while the loss is computed.
            offload = Operation(Verb.OFFLOAD, block, (Role.ATTENTION,), "forward", round)
            fetch = Operation(Verb.FETCH, block, (Role.ATTENTION,), "backward", round)
            (before if block < last_layer - 1 and round == 0 else either).append(offload)
            (after if block < last_layer else either).append(fetch)
    frozen = Role.WEIGHT in staged and model.shard_elements(False) > 0
    frozen |= at.touches(Role.FROZEN, Tier.NVME)
    by_resource: dict[str, _Seconds] = defaultdict(_Seconds)
    lists = {"before": before, "after": after, "either": either, "write": write, "again": again}
    for name, operations in lists.items():
        for resource, seconds in builder.totals(operations).items():
            setattr(by_resource[resource], name, seconds)
    return _RequiredWork(
        by_resource=dict(by_resource),
        elements=model.shard_elements(True),
        writes_all=not staged or (bool(back) and not frozen),
    )


def _compute_operations(inventory: Inventory, block: int, rounds: int) -> Iterator[Operation]:
    """Yield all computations on a block."""
    head = inventory.blocks[block].kind == "head"
    for round in range(rounds):
        if not head:
            yield Operation(Verb.FORWARD, block, (), "forward", round)
        yield Operation(Verb.LOSS if head else Verb.BACKWARD, block, (), "backward", round)
