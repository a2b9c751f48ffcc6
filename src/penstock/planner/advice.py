"""Find out what would speed up a plan most: plan with other budgets, formats and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.machine.machine import Figure, Machine
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, with_budget_memory
from penstock.plan.working_memory import WorkingMemorySource
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload, resized
from penstock.planner import (
    PlannerCache,
    PlanResult,
    find_plan,
    fits,
    quick_step_seconds,
)
from penstock.planner.evaluator import PlanEvaluator
from penstock.tiers import Tier
from penstock.units import GiB

WORTH = 1.03
"""Smallest speedup to report. Smaller differences are within the error of the cost model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change that would help."""

    what: str
    """The change."""

    speedup: float
    """Tokens per second relative to the plan's; 1 if the gain is not speed."""

    gain: str
    """The gain, in words."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A plan, and everything needed to plan again with a change."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What to train."""

    budget: Budget
    """How much of each tier may be used."""

    machine: Machine
    """The machine."""

    result: PlanResult
    """The plan without a change."""

    source: WorkingMemorySource = estimate_working_memory
    """Says how much working memory the model needs."""

    cache: PlannerCache = field(default_factory=dict, compare=False, repr=False)
    """Results that all plans share."""

    def tokens_per_second(self, **changes: object) -> float | None:
        """Return the speed of a plan with some fields changed, or None if nothing fits."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        args = (changed.inventory, changed.workload, changed.budget, changed.machine)
        seconds = quick_step_seconds(*args, cache=self.cache, source=self.source)
        return None if seconds is None else changed.workload.tokens / seconds

    def tokens_per_second_now(self) -> float:
        """Return the speed of the plan, estimated in the same way."""
        plan, placement = self.result.plan, self.result.plan.placement
        evaluator = PlanEvaluator(
            self.inventory, self.workload, self.machine, plan.budget,
            piece_elements=placement.piece_elements, source=self.source, seats=plan.seats,
            transport=placement.transport,
        )  # fmt: skip
        return self.workload.tokens / evaluator.placement_seconds(placement)


def advise(what_if: WhatIf, most: int = 3) -> list[Advice]:
    """Return the few changes that help most, best first."""
    cost = what_if.result.cost
    # If the GPU is nearly always busy, no other placement can help.
    ideas = _ideas(what_if) if cost.busy.get("gpu", 0.0) * WORTH < 1 else ()
    helpful = [advice for advice in ideas if advice.speedup >= WORTH]
    helpful.sort(key=lambda advice: (-advice.speedup, advice.what))
    return helpful[:most] + _longest_context_without_nvme(what_if)


def _ideas(what_if: WhatIf) -> Iterator[Advice]:
    now = what_if.tokens_per_second_now()
    for what, changes in _changes(what_if):
        changed = what_if.tokens_per_second(**changes)
        if changed is not None:
            yield Advice(what=what, speedup=changed / now, gain=f"{changed / now:.2f}x")


def _changes(what_if: WhatIf) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the changes to try, in words and as fields of `WhatIf`."""
    budget, work, plan = what_if.budget, what_if.workload, what_if.result.plan
    for tier, more in ((Tier.DRAM, 16 * GiB), (Tier.DRAM, 64 * GiB), (Tier.HBM, 8 * GiB)):
        # More of a tier helps only if the plan uses nearly all of it.
        if plan.peak(tier) > 0.9 * plan.budget.of(tier):
            larger_budget = budget.changed(tier, budget.of(tier) + more)
            machine, _ = with_budget_memory(what_if.machine, larger_budget)
            changes: dict[str, object] = {"budget": larger_budget, "machine": machine}
            yield f"+{more // GiB} GiB {tier.value.upper()}", changes
    if what_if.result.plan.peak(Tier.NVME):
        yield "a second drive like the first", {"machine": _with_twice_the_disks(what_if.machine)}
    if work.moments == "fp32" and "bf16" in work.moment_formats:
        yield "--moments bf16 (not exact)", {"workload": replace(work, moments="bf16")}
    larger = resized(work, what_if.inventory, batch=2 * work.batch)
    yield f"--batch {larger.batch}", {"workload": larger}


def _longest_context_without_nvme(what_if: WhatIf) -> list[Advice]:
    """Halve the context until the plan needs no NVMe."""
    if not what_if.result.plan.peak(Tier.NVME):
        return []
    context = what_if.workload.context // 2
    budget = replace(what_if.budget, nvme=())
    while context >= 1024:
        work = resized(what_if.workload, what_if.inventory, context=context)
        args = (what_if.inventory, work, budget, what_if.machine)
        if fits(*args, source=what_if.source):
            return [Advice(what=f"--context {context}", speedup=1.0, gain="fits without NVMe")]
        context //= 2
    return []


def _with_twice_the_disks(machine: Machine) -> Machine:
    """Return the machine with all storage rates doubled."""

    def double(figure: Figure) -> Figure:
        low, high = 2 * figure.low, 2 * figure.high
        return replace(figure, median=2 * figure.median, low=low, high=high)

    storage = (
        replace(
            path,
            rates=tuple(
                replace(rate, bytes_per_second=double(rate.bytes_per_second)) for rate in path.rates
            ),
        )
        for path in machine.storage
    )
    return replace(machine, storage=tuple(storage))


# Step time over a range of budgets.


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPoint:
    """The step time with one budget."""

    nbytes: int
    """Budget of the tier in bytes."""

    step_seconds: float | None
    """Seconds per step, or None if nothing fits."""


def vary(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    tier: Tier,
    sizes: Sequence[int],
    *,
    source: WorkingMemorySource = estimate_working_memory,
) -> list[BudgetPoint]:
    """Return the step time for each budget of one tier: that of the plan `make_plan` makes."""
    cache: PlannerCache = {}
    points: list[BudgetPoint] = []
    for nbytes in sorted(sizes):
        changed = budget.changed(tier, nbytes)
        larger, _ = with_budget_memory(machine, changed)
        result = find_plan(inventory, workload, changed, larger, cache=cache, source=source)
        seconds = None if result is None else result.cost.step_seconds
        points.append(BudgetPoint(nbytes=nbytes, step_seconds=seconds))
    return points


def plot(points: Sequence[BudgetPoint], tier: Tier, path: Path) -> None:
    """Save the curve as an image. Needs matplotlib: `pip install penstock[plot]`."""
    try:
        import matplotlib
    except ImportError:
        raise PenstockError("plotting needs matplotlib: pip install 'penstock[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [point for point in points if point.step_seconds is not None]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    seconds = [p.step_seconds or 0.0 for p in known]
    axes.plot([p.nbytes / GiB for p in known], seconds, marker="o")
    axes.set_xlabel(f"{tier.value} budget (GiB)")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
