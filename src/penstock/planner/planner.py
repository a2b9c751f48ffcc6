"""The planner's face: make a plan, or say the least that would do. Room: decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import InfeasibleError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, PathBudget, check_paths
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload
from penstock.planner.candidate import Candidate
from penstock.planner.cost import Cost, phase_peaks
from penstock.planner.evaluator import PlanEvaluator
from penstock.planner.search import THOROUGH, SearchEffort, first_fit, search
from penstock.planner.staging_pieces import piece_sizes
from penstock.tiers import Tier
from penstock.units import KiB, MiB, format_bytes

_CEILING = 1 << 50
"""More than any machine has: what does not fit in this fits nowhere."""

_GRAIN = 64 * MiB
"""How finely the least budget is told; more finely where it is small."""

_FINEST = 64 * KiB


PlannerCache = dict[object, dict[Candidate, int]]
"""What questions about one model have in common; empty at first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """A plan and what it is expected to cost."""

    plan: Plan
    """What rests where."""

    cost: Cost
    """How long a step takes, and why."""

    peaks: Mapping[str, Mapping[Tier, int]]
    """The most bytes in use in each tier, in each of `cost.PHASES`. Never above the plan's peak,
    which is what is taken."""

    assumed: tuple[str, ...]
    """What the machine file did not say."""


def make_plan(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    *,
    effort: SearchEffort = THOROUGH,
) -> PlanResult:
    """The best plan found. InfeasibleError says the least budgets that would do."""
    found = find_plan(inventory, workload, budget, machine, effort=effort)
    if found is None:
        raise InfeasibleError(
            f"{inventory.model} at {workload.batch} x {workload.context} tokens does not fit in "
            + ", ".join(f"{format_bytes(budget.of(tier))} {tier}" for tier in Tier),
            least=least_budget(inventory, workload, budget, machine),
        )
    return found


def find_plan(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    *,
    effort: SearchEffort = THOROUGH,
    cache: PlannerCache | None = None,
) -> PlanResult | None:
    """The best plan found, or None. A `memory` makes the next question about the model quicker."""
    workload.check(inventory)
    check_paths(machine, budget)
    for piece in piece_sizes(inventory, workload, budget):
        evaluator = PlanEvaluator(inventory, workload, machine, budget, piece_elements=piece)
        if cache is not None:
            evaluator.remember(cache.setdefault((workload, piece, evaluator.context_nbytes), {}))
        candidate = search(evaluator, effort)
        if candidate is not None:
            return plan_result(evaluator, candidate)
    return None


def fits(inventory: Inventory, workload: Workload, budget: Budget, machine: Machine) -> bool:
    """Whether any placement does, untimed."""
    return first_fit(_frugal_desk(inventory, workload, budget, machine)) is not None


def _frugal_desk(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, unbounded: bool = False,
) -> PlanEvaluator:  # fmt: skip
    """With the smallest pieces, which leave the most room."""
    piece = piece_sizes(inventory, workload, budget)[-1]
    return PlanEvaluator(
        inventory, workload, machine, budget, unbounded=unbounded, piece_elements=piece
    )


def plan_result(evaluator: PlanEvaluator, candidate: Candidate) -> PlanResult:
    """A candidate, written out."""
    plan = Plan(
        model=evaluator.inventory.model,
        fingerprint=evaluator.inventory.fingerprint,
        parameters=evaluator.inventory.parameters(),
        machine=evaluator.machine.name,
        workload=evaluator.workload,
        budget=evaluator.budget,
        placement=evaluator.placement(candidate),
        pools=evaluator.pools(candidate),
        note=evaluator.inventory.not_trainable,
    )
    cost = evaluator.cost(candidate)
    args = (evaluator.inventory, evaluator.workload, plan.placement, cost.schedule, plan.pools)
    return PlanResult(
        plan=plan, cost=cost, peaks=phase_peaks(*args), assumed=evaluator.rates.assumed
    )


def least_budget(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine
) -> dict[str, int | None]:
    """Per tier, the least that makes it fit with the other budgets as they are, by bisection; None
    where no amount of that tier alone would do."""
    evaluator = _frugal_desk(inventory, workload, budget, machine, unbounded=True)
    return {
        tier.value: _least(evaluator, _with_paths(budget, machine, tier), tier)
        for tier in Tier
        if tier is not Tier.CXL or machine.cxl_nodes
    }


def _least(evaluator: PlanEvaluator, budget: Budget, tier: Tier) -> int | None:
    def enough(nbytes: int) -> bool:
        return first_fit(evaluator.with_budget(budget.changed(tier, nbytes))) is not None

    if (tier is Tier.NVME and not budget.nvme) or not enough(_CEILING):
        return None
    low, high = 0, _FINEST
    while not enough(high):
        low, high = high, high * 2
    while high - low > max(_FINEST, min(_GRAIN, high // 32)):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _with_paths(budget: Budget, machine: Machine, tier: Tier) -> Budget:
    """No NVMe was offered, but the machine has some: say what that would take."""
    if tier is Tier.NVME and not budget.of(tier) and machine.storage:
        path = PathBudget(path=machine.storage[0].path, nbytes=1)
        return Budget(hbm=budget.hbm, dram=budget.dram, cxl=budget.cxl, nvme=(path,))
    return budget
