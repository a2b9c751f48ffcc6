"""What a step costs: seconds, phases, busy shares, and what bounds it. Room: decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.model.inventory import Inventory
from penstock.plan.build_schedule import step_schedule
from penstock.plan.placement import Placement
from penstock.plan.schedule import COMPUTE, Operation, Schedule, Verb
from penstock.plan.workload import Workload
from penstock.planner.cost.jobs import Known, Translator
from penstock.planner.cost.rates import Rates
from penstock.planner.cost.simulation import Job, Span, Speeds, critical_path, seconds, simulate
from penstock.roles import STATE, TRAINED, Role
from penstock.tiers import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """One step, timed."""

    step_seconds: float
    """From one step's start to the next one's."""

    tokens_per_second: float
    """What the step is worth."""

    phases: Mapping[str, float]
    """Seconds until forward, sweeps included, is over, and from then on."""

    busy: Mapping[str, float]
    """The share of the step that each resource works."""

    bounds: Mapping[str, float]
    """Seconds of the critical path that each resource accounts for, most first."""

    spans: tuple[Span, ...]
    """When each operation of the schedule runs."""

    schedule: Schedule
    """The operations."""

    @property
    def bound_by(self) -> str:
        """The resource that, made faster, shortens the step most."""
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
    """Time one step. Pure, and the same for the same arguments on any machine.

    `schedule` saves writing it again; `gpus` is how many share the host and do the same.
    """
    schedule = schedule or step_schedule(inventory, placement)
    translator = Translator(inventory, workload, placement, rates, gpus)
    jobs = translator.jobs(schedule)
    spans = simulate(jobs)
    seconds = max(span.end for span in spans)
    turn = max(
        (s.end for s, o in zip(spans, schedule.operations, strict=True)
         if o.phase == "forward" and o.verb == "forward" and o.round == 0),
        default=0.0,
    )  # fmt: skip
    return Cost(
        step_seconds=seconds,
        tokens_per_second=workload.tokens / seconds,
        phases={"forward": turn, "backward": seconds - turn},
        busy=busy_shares(jobs, seconds),
        bounds=bounds(jobs, spans),
        spans=tuple(spans),
        schedule=schedule,
    )


def busy_shares(jobs: Sequence[Job], seconds: float) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for job in jobs:
        for resource, wanted in job.demands.items():
            totals[resource] += wanted
    return {resource: total / seconds for resource, total in sorted(totals.items())}


def bounds(jobs: Sequence[Job], spans: Sequence[Span]) -> dict[str, float]:
    """Each moment of the critical path counts for the resource its job needs most."""
    totals: dict[str, float] = defaultdict(float)
    for i in critical_path(spans):
        if jobs[i].demands:
            totals[_bottleneck(jobs[i].demands)] += spans[i].end - spans[i].start
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def _bottleneck(demands: Mapping[str, float]) -> str:
    return max(demands, key=lambda resource: (demands[resource], resource))


# --------
# How long a step takes, asked of many placements in a row. Room: decide.


@dataclass(slots=True)
class StepTimer:
    """Times placements of one model and work on one machine: what they have in common is worked
    out once. It must not outlive the homes of those placements, which it knows by identity."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is done."""

    rates: Rates
    """On what."""

    issued: int = 0
    """As the translator has it."""

    _known: Known = field(init=False, default_factory=dict)
    _speeds: Speeds = field(init=False, default_factory=dict)
    _blocks: dict[tuple[int, ...], Mapping[str, float]] = field(init=False, default_factory=dict)

    def seconds(self, placement: Placement, schedule: Schedule) -> float:
        """What `estimate` calls the step's seconds."""
        return seconds(self._translator(placement).jobs(schedule), self._speeds)

    def at_least(self, placement: Placement) -> float:
        """What the busiest resource works: no order of the step ends sooner."""
        totals: dict[str, float] = defaultdict(float)
        translator = self._translator(placement)
        for block, at in enumerate(placement.blocks):
            key = (block, placement.rounds, *map(id, at.homes))
            if key not in self._blocks:
                self._blocks[key] = translator.totals(_operations(placement, block, self.inventory))
            for resource, wanted in self._blocks[key].items():
                totals[resource] += wanted
        return max(totals.values())

    def computing(self, placement: Placement) -> float:
        """What the GPU computes and the host launches for it, without sweeps: wherever anything
        rests, no step ends sooner."""
        translator = self._translator(placement)
        blocks = range(len(placement.blocks))
        needed = (o for i in blocks for o in _operations(placement, i, self.inventory))
        return max(translator.totals(o for o in needed if o.verb in COMPUTE).values())

    def _translator(self, placement: Placement) -> Translator:
        parts = (self.inventory, self.workload, placement, self.rates)
        return Translator(*parts, issued=self.issued, known=self._known)


def _operations(placement: Placement, block: int, inventory: Inventory) -> Iterator[Operation]:
    """What a step cannot do without. Weights may stay over the turn: they are fetched once."""
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
        for role in (Role.GRADIENT, Role.INPUT):
            if at.home(role):
                yield Operation(Verb.DRAIN, block, (role,), "backward", round)
        if at.home(Role.INPUT):
            yield Operation(Verb.FETCH, block, (Role.INPUT,), "backward", round)
