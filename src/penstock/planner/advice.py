"""What would help most: other budgets, formats and sizes, planned and compared. Room: show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget
from penstock.plan.workload import Workload, default_numerics
from penstock.planner import QUICK, PlannerCache, PlanResult, SearchEffort, find_plan, fits
from penstock.tiers import Tier
from penstock.units import GiB

WORTH = 1.03
"""Less than this is within what the cost model can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing that would help."""

    what: str
    """What to do."""

    speedup: float
    """Tokens per second against the plan's; 1 where the gain is another."""

    gain: str
    """In words."""


@dataclass(frozen=True, slots=True)
class Question:
    """A plan, and everything needed to ask "what if"."""

    inventory: Inventory
    """The model."""

    workload: Workload
    """What is done."""

    budget: Budget
    """With what."""

    machine: Machine
    """On what."""

    planned: PlanResult
    """The answer as it is."""

    memory: PlannerCache = field(default_factory=dict, compare=False, repr=False)
    """What the questions have in common."""

    def ask(self, **changes: object) -> PlanResult | None:
        """The plan with something changed, or None if that does not fit."""
        asked = replace(self, **changes)  # type: ignore[arg-type]
        args = (asked.inventory, asked.workload, asked.budget, asked.machine)
        return find_plan(*args, effort=QUICK, cache=self.memory)


def advise(question: Question, most: int = 3) -> list[Advice]:
    """The few things that help most, best first."""
    cost = question.planned.cost
    computing = cost.bounds.get("gpu", 0.0) / cost.step_seconds
    ideas = _ideas(question) if computing * WORTH < 1 else ()  # no other placement can help
    found = [advice for advice in ideas if advice.speedup >= WORTH]
    found.sort(key=lambda advice: (-advice.speedup, advice.what))
    return found[:most] + _without_nvme(question)


def _ideas(question: Question) -> Iterator[Advice]:
    now = question.planned.cost.tokens_per_second
    for what, changes in _changes(question):
        planned = question.ask(**changes)
        if planned is not None:
            speedup = planned.cost.tokens_per_second / now
            yield Advice(what=what, speedup=speedup, gain=f"{speedup:.2f} x")


def _changes(question: Question) -> Iterator[tuple[str, dict[str, object]]]:
    budget, work = question.budget, question.workload
    for tier, more in ((Tier.DRAM, 16 * GiB), (Tier.DRAM, 64 * GiB), (Tier.HBM, 8 * GiB)):
        if question.planned.plan.peak(tier) > 0.9 * budget.of(tier):
            yield (
                f"+{more // GiB} GiB {tier.value.upper()}",
                {"budget": budget.changed(tier, budget.of(tier) + more),
                 "machine": _with_more(question.machine, tier, more)},
            )  # fmt: skip
    if question.planned.plan.peak(Tier.NVME):
        yield "a second drive like the first", {"machine": _faster_disks(question.machine)}
    if work.moments == "fp32":
        yield "--moments bf16 (not exact)", {"workload": replace(work, moments="bf16")}
    yield f"--batch {2 * work.batch}", {"workload": replace(work, batch=2 * work.batch)}


def _without_nvme(question: Question) -> list[Advice]:
    """The longest context, by halves, that needs no NVMe."""
    if not question.planned.plan.peak(Tier.NVME):
        return []
    context = question.workload.context // 2
    budget = replace(question.budget, nvme=())
    while context >= 1024:
        numerics = default_numerics(
            question.inventory, context=context, batch=question.workload.batch
        )
        work = replace(question.workload, context=context, numerics=numerics)
        if fits(question.inventory, work, budget, question.machine):
            return [Advice(what=f"context {context:,}", speedup=1.0, gain="fits without NVMe")]
        context //= 2
    return []


def _with_more(machine: Machine, tier: Tier, more: int) -> Machine:
    if tier is Tier.HBM:
        gpus = tuple(replace(g, memory=(g.memory or 0) + more) for g in machine.gpus)
        return replace(machine, gpus=gpus)
    first = machine.dram_nodes[0]
    larger = replace(first, capacity=first.capacity + more)
    return replace(machine, nodes=tuple(larger if n is first else n for n in machine.nodes))


def _faster_disks(machine: Machine) -> Machine:
    def twice(value: float) -> float:
        return 2 * value

    def double(rate: object) -> object:
        figure = rate.bytes_per_second  # type: ignore[attr-defined]
        faster = replace(
            figure, median=twice(figure.median), low=twice(figure.low), high=twice(figure.high)
        )
        return replace(rate, bytes_per_second=faster)  # type: ignore[type-var]

    paths = (replace(s, rates=tuple(double(r) for r in s.rates)) for s in machine.storage)  # type: ignore[misc]
    return replace(machine, storage=tuple(paths))


# Step time against a budget.


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One budget of a curve."""

    nbytes: int
    """The tier's budget."""

    step_seconds: float | None
    """None where it does not fit."""


def vary(
    question: Question, tier: Tier, sizes: Sequence[int], effort: SearchEffort = QUICK
) -> list[Point]:
    """The step's time for each size of one tier. More is never worse: what fits in less fits."""
    points: list[Point] = []
    best: float | None = None
    for nbytes in sorted(sizes):
        planned = find_plan(
            question.inventory,
            question.workload,
            question.budget.changed(tier, nbytes),
            _roomy(question.machine, tier, nbytes),
            effort=effort,
            cache=question.memory,
        )
        if planned is not None:
            best = min(best or planned.cost.step_seconds, planned.cost.step_seconds)
        points.append(Point(nbytes=nbytes, step_seconds=best))
    return points


def _roomy(machine: Machine, tier: Tier, nbytes: int) -> Machine:
    if tier in (Tier.DRAM, Tier.HBM):
        return _with_more(machine, tier, nbytes)
    return machine


def plot(points: Sequence[Point], tier: Tier, path: Path) -> None:
    """The curve as a picture. Needs matplotlib: `pip install penstock[plot]`."""
    try:
        import matplotlib
    except ImportError:
        raise PenstockError("drawing needs matplotlib: pip install 'penstock[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [point for point in points if point.step_seconds is not None]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    seconds = [p.step_seconds or 0.0 for p in known]
    axes.plot([p.nbytes / GiB for p in known], seconds, marker="o")
    axes.set_xlabel(f"{tier.value} budget, GiB")
    axes.set_ylabel("step, s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
