"""Estimate what a step costs: seconds, phases, how busy each resource is, and what limits it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.model.inventory import Inventory
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import Placement
from penstock.plan.schedule import COMPUTE, Operation, Schedule, Verb
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
from penstock.roles import STATE, TRAINED, Role
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
    gpus: int = 1,
) -> Cost:
    """Estimate the cost of one step. The result depends on nothing but the arguments.

    Args:
        inventory: The model.
        workload: What to train.
        placement: Where everything is stored.
        rates: Speeds of the machine.
        schedule: The schedule of the placement, if it has been built already.
        gpus: Number of GPUs that share the host and do the same.
    """
    schedule = schedule or step_schedule(inventory, placement)
    node = placement.host_node
    if node is not None and node in rates.nodes:  # a plan file may name another node than `rates`
        rates = replace(rates, staging_node=node)
    jobs = JobBuilder(inventory, workload, placement, rates, gpus).jobs(schedule)
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

    _demands: DemandCache = field(init=False, default_factory=dict)
    _speeds: SpeedCache = field(init=False, default_factory=dict)
    _block_totals: dict[tuple[int, ...], Mapping[str, float]] = field(
        init=False, default_factory=dict
    )

    def seconds(self, placement: Placement, schedule: Schedule) -> float:
        """Return the same as `estimate(...).step_seconds`."""
        return simulate_seconds(self._builder(placement).jobs(schedule), self._speeds)

    def lower_bound(self, placement: Placement) -> float:
        """Return how long the busiest resource works. No step is shorter, in whatever order."""
        totals: dict[str, float] = defaultdict(float)
        builder = self._builder(placement)
        for block, at in enumerate(placement.blocks):
            key = (block, placement.rounds, *map(id, at.homes))
            if key not in self._block_totals:
                operations = _required_operations(placement, block, self.inventory)
                self._block_totals[key] = builder.totals(operations)
            for resource, wanted in self._block_totals[key].items():
                totals[resource] += wanted
        return max(totals.values())

    def compute_seconds(self, placement: Placement) -> float:
        """Return how long the GPU computes and the host launches, without optimizer sweeps.

        No step is shorter, wherever anything is stored.
        """
        builder = self._builder(placement)
        blocks = range(len(placement.blocks))
        required = (o for i in blocks for o in _required_operations(placement, i, self.inventory))
        return max(builder.totals(o for o in required if o.verb in COMPUTE).values())

    def _builder(self, placement: Placement) -> JobBuilder:
        parts = (self.inventory, self.workload, placement, self.rates)
        return JobBuilder(*parts, issued=self.issued, known=self._demands)


def _required_operations(
    placement: Placement, block: int, inventory: Inventory
) -> Iterator[Operation]:
    """Yield the operations on a block that no schedule can avoid.

    Weights count as fetched only once, because they may stay in HBM between forward and backward.
    """
    at = placement.blocks[block]
    kind = inventory.blocks[block].kind
    staged = tuple(role for role in TRAINED if at.touches(role, Tier.NVME))
    if at.sweep != "none":
        yield Operation(Verb.SWEEP, block, TRAINED, "forward", gpu=at.sweep == "gpu")
        yield Operation(Verb.READ, block, staged, "forward")
        back = tuple(role for role in (Role.WEIGHT, *STATE) if role in staged)
        yield Operation(Verb.WRITE, block, back, "forward")
    if at.home(Role.WEIGHT):
        yield Operation(Verb.FETCH, block, (Role.WEIGHT,), "forward")
    for round in range(placement.rounds):
        if kind != "head":
            yield Operation(Verb.FORWARD, block, (), "forward", round)
        verb = Verb.LOSS if kind == "head" else Verb.BACKWARD
        yield Operation(verb, block, (), "backward", round)
        for role in (Role.GRADIENT, Role.ACTIVATION):
            if at.home(role):
                yield Operation(Verb.OFFLOAD, block, (role,), "backward", round)
        if at.home(Role.ACTIVATION):
            yield Operation(Verb.FETCH, block, (Role.ACTIVATION,), "backward", round)
