"""What a step costs: seconds, phases, busy shares, and what bounds it. Room: decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.cost.jobs import Translator
from penstock.cost.rates import Rates
from penstock.cost.simulate import Job, Span, critical_path, simulate
from penstock.inventory import Inventory
from penstock.placement_parts import Placement
from penstock.schedule import Schedule
from penstock.step_order import step_schedule
from penstock.workload import Workload


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
