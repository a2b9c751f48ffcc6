"""Make a plan that fits the budgets, or report the smallest budgets that would be enough."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, PathBudget, check_paths, process_memory, with_paths
from penstock.plan.memory_interpolation import interpolated
from penstock.plan.placement import TransportName
from penstock.plan.plan import Plan
from penstock.plan.seats import rank_budget, seat_ranks
from penstock.plan.traffic import step_disk_writes
from penstock.plan.working_memory import WorkingMemory, WorkingMemorySource
from penstock.plan.working_memory_estimate import estimate_working_memory
from penstock.plan.workload import Workload
from penstock.planner.candidate import Candidate
from penstock.planner.cost import Cost, phase_peaks
from penstock.planner.drives import DriveWeights
from penstock.planner.evaluator import HbmCache, PlanEvaluator
from penstock.planner.feasibility import HbmChoices, first_fit, may_fit
from penstock.planner.infeasible import infeasible_error, new_path
from penstock.planner.search import (
    QUICK,
    THOROUGH,
    Found,
    MakeEvaluator,
    SearchEffort,
    search_drives,
)
from penstock.planner.staging_pieces import piece_sizes
from penstock.planner.transports import check_transport, usable_transports
from penstock.tiers import Tier
from penstock.units import KiB, MiB, format_bytes

_CEILING = 1 << 50
"""More bytes than any machine has. What does not fit in this never fits."""

_GRAIN = 64 * MiB
"""Resolution of the smallest sufficient budget. It is finer for small budgets."""

_FINEST = 64 * KiB
"""Finest resolution of the smallest sufficient budget."""


PlannerCache = dict[object, HbmCache]
"""Results that several plans for one model can share. Start with an empty dictionary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """A plan and its estimated cost."""

    plan: Plan
    """What is stored where."""

    cost: Cost
    """How long a step takes, and what limits it."""

    peaks: Mapping[str, Mapping[Tier, int]]
    """The most bytes in use in each tier during each of `cost.PHASES`. They never exceed the plan's
    peak, which is what the engine allocates."""

    disk_writes: Mapping[str, int]
    """Bytes that one step writes to each NVMe path that the plan writes to."""

    memory: WorkingMemory
    """The working memory of each part of the model."""

    assumed: tuple[str, ...]
    """Assumptions about what the machine file does not state."""


def make_plan(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    *,
    effort: SearchEffort = THOROUGH,
    source: WorkingMemorySource = estimate_working_memory,
    transport: TransportName | None = None,
) -> PlanResult:
    """Return the best plan found.

    The budget is that of one machine, except that HBM is per GPU. `transport` says how ranks reach
    each other; by default, in the faster way. `source` says how much working memory the model
    needs. Raises InfeasibleError if nothing fits. The error contains the smallest budgets that
    would be enough.
    """
    result = find_plan(
        inventory, workload, budget, machine, effort=effort, source=source, transport=transport
    )
    if result is None:
        args = (inventory, workload, budget, machine)
        # Suggestions try many other workloads. Trace a workload only if the quick estimate fits.
        quick = interpolated(source, workload)

        def enough(other: Workload, budget: Budget, machine: Machine) -> bool:
            args = (inventory, other, budget, machine)
            return fits(*args, source=quick) and fits(*args, source=source)

        least = least_budget(*args, source=source)
        pair = None
        if least["nvme"] is None:  # otherwise NVMe alone is enough
            pair = least_hbm_with_nvme(*args, source=source)
        raise infeasible_error(*args, least=least, fits=enough, pair=pair)
    return result


def find_plan(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    *,
    effort: SearchEffort = THOROUGH,
    cache: PlannerCache | None = None,
    source: WorkingMemorySource = estimate_working_memory,
    transport: TransportName | None = None,
) -> PlanResult | None:
    """Return the best plan found, or None if nothing fits.

    A `cache` speeds up further calls for the same model. It does not change the result.
    """
    args = (inventory, workload, budget, machine)
    with _collector_paused():
        chosen = _fastest_transport(*args, cache=cache, source=source, wanted=transport)
        for make in _makers(*args, cache=cache, source=source, transport=chosen):
            found = search_drives(make, effort)
            if found is not None:
                return plan_result(*found)
        fit = _any_fit(*args, source=source, transport=chosen)
    return None if fit is None else plan_result(*fit)


def _fastest_transport(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, cache: PlannerCache | None, source: WorkingMemorySource, wanted: TransportName | None,
) -> TransportName | None:  # fmt: skip
    """Return the transport with which a quick search finds the fastest plan."""
    usable = usable_transports(machine, workload.world)
    if wanted is not None and usable:
        check_transport(machine, wanted)
        return wanted
    if len(usable) < 2:
        return usable[0] if usable else None

    def seconds(transport: TransportName) -> float:
        args = (inventory, workload, budget, machine)
        quick = _quick_seconds(*args, cache=cache, source=source, transport=transport)
        return math.inf if quick is None else quick

    return min(usable, key=seconds)


def quick_step_seconds(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    *,
    cache: PlannerCache | None = None,
    source: WorkingMemorySource = estimate_working_memory,
) -> float | None:
    """Return about how long a step of a good plan takes, or None if nothing fits.

    For what-if questions: bytes are counted quickly, and steps are timed with coarse pieces.
    """
    args = (inventory, workload, budget, machine)
    with _collector_paused():
        times = [
            _quick_seconds(*args, cache=cache, source=source, transport=transport)
            for transport in usable_transports(machine, workload.world) or (None,)
        ]
    return min((seconds for seconds in times if seconds is not None), default=None)


def _quick_seconds(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, cache: PlannerCache | None, source: WorkingMemorySource, transport: TransportName | None,
) -> float | None:  # fmt: skip
    args = (inventory, workload, budget, machine)
    for make in _makers(*args, cache=cache, source=source, transport=transport):
        found = search_drives(make, QUICK, exact=False)
        if found is not None:
            evaluator, candidate = found
            return evaluator.seconds(candidate)
    fit = _any_fit(*args, source=source, transport=transport)
    return None if fit is None else fit[0].seconds(fit[1])


def _makers(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, cache: PlannerCache | None, source: WorkingMemorySource, transport: TransportName | None,
) -> Iterator[MakeEvaluator]:  # fmt: skip
    """Yield, for each size of pieces to try, a function that makes evaluators."""
    workload.check(inventory)
    check_paths(machine, budget)
    seats = seat_ranks(machine, workload.world, [path.path for path in budget.nvme])
    budget = rank_budget(budget, seats)
    for piece in piece_sizes(inventory, workload, budget):

        def make(drives: DriveWeights | None, piece: int = piece) -> PlanEvaluator:
            evaluator = PlanEvaluator(
                inventory, workload, machine, budget, piece_elements=piece, source=source,
                drives=drives, seats=seats, transport=transport,
            )  # fmt: skip
            if cache is not None:
                key = (workload, piece, evaluator.context_nbytes, evaluator.memory, transport)
                evaluator.use_hbm_cache(cache.setdefault(key, {}))
            return evaluator

        yield make


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector.

    Planning makes millions of small objects and no reference cycles. Looking for cycles among them
    would take a quarter of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fits(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, source: WorkingMemorySource = estimate_working_memory,
) -> bool:  # fmt: skip
    """Return whether any placement fits, without timing it."""
    args = (inventory, workload, budget, machine)
    with _collector_paused():
        return any(
            _any_fit(*args, source=source, transport=transport) is not None
            for transport in usable_transports(machine, workload.world) or (None,)
        )


def _any_fit(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, source: WorkingMemorySource, transport: TransportName | None,
) -> Found | None:  # fmt: skip
    """Return a candidate that fits, and its evaluator, or None."""
    evaluator = _smallest_pieces_evaluator(
        inventory, workload, budget, machine, source=source, transport=transport
    )
    candidate = first_fit(evaluator)
    return None if candidate is None else (evaluator, candidate)


def plan_result(evaluator: PlanEvaluator, candidate: Candidate) -> PlanResult:
    """Return a candidate as a plan with its cost."""
    plan = Plan(
        model=evaluator.inventory.model,
        fingerprint=evaluator.inventory.fingerprint,
        parameters=evaluator.inventory.parameters(),
        machine=evaluator.machine.name,
        workload=evaluator.workload,
        budget=evaluator.budget,
        placement=evaluator.placement(candidate),
        seats=evaluator.seats,
        pools=evaluator.pools(candidate),
        process_memory=process_memory(evaluator.machine),
        note=evaluator.inventory.not_trainable,
    )
    cost = evaluator.cost(candidate)
    args = (evaluator.inventory, evaluator.workload, plan.placement, cost.schedule)
    return PlanResult(
        plan=plan,
        cost=cost,
        peaks=phase_peaks(*args, plan.pools),
        disk_writes=step_disk_writes(*args),
        memory=evaluator.memory,
        assumed=evaluator.rates.assumed + _assumed_process(evaluator.machine, plan),
    )


def _assumed_process(machine: Machine, plan: Plan) -> tuple[str, ...]:
    """Return the assumption about the memory of the process, unless it was measured."""
    if machine.process_memory is not None:
        return ()
    return (f"{format_bytes(plan.process_memory)} for the process itself",)


def least_budget(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, source: WorkingMemorySource = estimate_working_memory,
) -> dict[str, int | None]:  # fmt: skip
    """Return, for each tier, the smallest budget that is enough, found by bisection.

    The other budgets stay as they are, as far as the machine has that much host memory. None means
    that no budget of that tier alone is enough. As the budget, they are those of one machine.
    """
    transport = next(iter(usable_transports(machine, workload.world)), None)
    bounded = _smallest_pieces_evaluator(
        inventory, workload, budget, machine, source=source, transport=transport
    )
    budget = bounded.budget
    budget = replace(budget, dram=bounded.capacity(Tier.DRAM), cxl=bounded.capacity(Tier.CXL))
    # Only the tier in question may be larger than the machine's.
    evaluator = replace(bounded, budget=budget, unbounded=True)
    cache: HbmChoices = {}
    with _collector_paused():
        least = {
            tier: _least(evaluator, _offer_nvme(budget, machine, tier), tier, cache)
            for tier in Tier
            if tier is not Tier.CXL or machine.cxl_nodes
        }
    times = {tier: 1 if tier is Tier.HBM else bounded.ranks.local for tier in Tier}
    return {
        tier.value: None if nbytes is None else times[tier] * nbytes
        for tier, nbytes in least.items()
    }


def least_hbm_with_nvme(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, source: WorkingMemorySource = estimate_working_memory,
) -> Budget | None:  # fmt: skip
    """Return the smallest HBM budget that is enough with NVMe, and the NVMe that it takes then.

    None if nothing fits, or if the HBM budget is large enough as it is. The drives are those of the
    budget, or the machine's first one, or one to be added.
    """
    if not budget.nvme:
        budget = replace(budget, nvme=(new_path(machine),))
        machine = with_paths(machine, budget)[0]
    transport = next(iter(usable_transports(machine, workload.world)), None)
    bounded = _smallest_pieces_evaluator(
        inventory, workload, budget, machine, source=source, transport=transport
    )
    own = bounded.budget
    most = replace(own, dram=bounded.capacity(Tier.DRAM), cxl=bounded.capacity(Tier.CXL))
    most = most.changed(Tier.NVME, _CEILING)
    evaluator = replace(bounded, budget=most, unbounded=True)
    cache: HbmChoices = {}
    with _collector_paused():
        hbm = _least(evaluator, most, Tier.HBM, cache)
        if hbm is None or hbm <= own.hbm:
            return None
        nvme = _least(evaluator, most.changed(Tier.HBM, hbm), Tier.NVME, cache)
    if nvme is None:
        return None
    return budget.changed(Tier.HBM, hbm).changed(Tier.NVME, bounded.ranks.local * nvme)


def _smallest_pieces_evaluator(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine,
    *, source: WorkingMemorySource, transport: TransportName | None,
) -> PlanEvaluator:  # fmt: skip
    """Return an evaluator with the smallest pieces, which need the least staging memory."""
    seats = seat_ranks(machine, workload.world, [path.path for path in budget.nvme])
    budget = rank_budget(budget, seats)
    piece = piece_sizes(inventory, workload, budget)[-1]
    return PlanEvaluator(
        inventory, workload, machine, budget, piece_elements=piece, source=source, seats=seats,
        transport=transport,
    )  # fmt: skip


def _least(evaluator: PlanEvaluator, budget: Budget, tier: Tier, cache: HbmChoices) -> int | None:
    def may_be_enough(nbytes: int) -> bool:
        return may_fit(evaluator.with_budget(budget.changed(tier, nbytes)), cache)

    def enough(nbytes: int) -> bool:
        return first_fit(evaluator.with_budget(budget.changed(tier, nbytes)), cache) is not None

    if (tier is Tier.NVME and not budget.nvme) or not enough(_CEILING):
        return None
    # Counting to the byte takes most of the time. What is too little by the quick count is too
    # little in any case, so count to the byte only from there on.
    least = _bisect(may_be_enough, 0, _FINEST)
    return least if enough(least) else _bisect(enough, least, least + _grain(least))


def _bisect(enough: Callable[[int], bool], low: int, high: int) -> int:
    """Return a budget that is enough, at most a grain above one that is too small.

    `low` is too small. `high` is a first guess.
    """
    while not enough(high):
        low, high = high, high * 2
    while high - low > _grain(high):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _grain(nbytes: int) -> int:
    return max(_FINEST, min(_GRAIN, nbytes // 32))


def _offer_nvme(budget: Budget, machine: Machine, tier: Tier) -> Budget:
    """Add the machine's first path to a budget without NVMe, if NVMe is the tier to vary."""
    if tier is Tier.NVME and not budget.of(tier) and machine.storage:
        path = PathBudget(path=machine.storage[0].path, nbytes=1)
        return Budget(hbm=budget.hbm, dram=budget.dram, cxl=budget.cxl, nvme=(path,))
    return budget
