"""Say why nothing fits, and suggest only what the machine can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from penstock.errors import InfeasibleError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, PathBudget, parse_budget, tier_capacity, with_paths
from penstock.plan.workload import Workload, resized
from penstock.tiers import Tier
from penstock.units import TiB, format_bytes, format_bytes_up

SHORTEST_CONTEXT = 256
"""Shortest context in tokens to suggest."""

LESS_HBM = 0.9
"""Share of the HBM that is enough alone, below which HBM and NVMe together are suggested."""

_NEW_PATH = "PATH"
"""Stands for an NVMe path of the user's."""

Fits = Callable[[Workload, Budget, Machine], bool]
"""Returns whether any placement fits."""


def infeasible_error(
    inventory: Inventory,
    workload: Workload,
    budget: Budget,
    machine: Machine,
    *,
    least: Mapping[str, int | None],
    fits: Fits,
    pair: Budget | None = None,
) -> InfeasibleError:
    """Return the error for a workload that fits nowhere.

    Args:
        inventory: The model.
        workload: What to train.
        budget: How much of each tier may be used.
        machine: The machine.
        least: For each tier, the smallest budget that is enough, or None.
        fits: Returns whether a changed workload, budget or machine fits.
        pair: The smallest HBM budget that is enough with more NVMe, and that NVMe; None if NVMe
            does not make the HBM budget smaller.
    """
    capacities = {tier: tier_capacity(machine, budget, tier) for tier in Tier}
    name = machine.name or "this machine"
    problem = (
        f"{inventory.model} at {workload.batch} x {workload.context} tokens"
        f"{_on_ranks(workload.world, machine)} does not fit in "
        + ", ".join(_budget_text(tier, budget, capacities[tier], name) for tier in Tier)
    )
    helpful: list[str] = []
    too_small: list[str] = []
    for tier, nbytes in ((Tier(each), nbytes) for each, nbytes in least.items()):
        capacity = capacities[tier]
        if nbytes is None:
            continue
        if capacity is None or nbytes <= capacity:
            helpful.append(f"--{tier} {_size(tier, nbytes, budget, machine)} or more")
        else:
            too_small.append(
                f"no --{tier} on {name} is enough: that takes "
                f"{format_bytes(nbytes)}, and it has {format_bytes(capacity)}"
            )
    helpful += _two_tiers(pair, least, capacities, machine)
    helpful += _other_changes(inventory, workload, budget, machine, fits)
    helpful = helpful or _whole_machine(workload, machine, fits)
    advice = [f"it fits with {', or with '.join(helpful)}"] if helpful else [
        "more of one tier alone, a smaller micro-batch or a shorter context is not enough; give "
        "more of several tiers, or train a smaller model"
    ]  # fmt: skip
    return InfeasibleError(problem, least=least, advice="; ".join(advice + too_small))


def _two_tiers(
    pair: Budget | None,
    least: Mapping[str, int | None],
    capacities: Mapping[Tier, int | None],
    machine: Machine,
) -> Iterator[str]:
    """Yield the flags of HBM and NVMe together, if that takes much less HBM than HBM alone."""
    alone = least.get(Tier.HBM)
    if pair is None or (alone is not None and pair.hbm > LESS_HBM * alone):
        return
    for tier in (Tier.HBM, Tier.NVME):
        capacity = capacities[tier]
        if capacity is not None and pair.of(tier) > capacity:
            return
    nvme = _size(Tier.NVME, pair.of(Tier.NVME), pair, machine)
    yield f"--hbm {format_bytes_up(pair.hbm)} and --nvme {nvme}"


def _on_ranks(world: int, machine: Machine) -> str:
    if world == 1:
        return ""
    each = f" on each of {machine.machines} machines" if machine.machines > 1 else ""
    return f" on {world // machine.machines} GPUs{each}"


def _budget_text(tier: Tier, budget: Budget, capacity: int | None, machine: str) -> str:
    """Return a tier's budget, and what the machine has if that is less."""
    text = f"{format_bytes(budget.of(tier))} {tier}"
    if capacity is None or budget.of(tier) <= capacity:
        return text
    return f"{text} ({machine} has {format_bytes(capacity)})"


def _size(tier: Tier, nbytes: int, budget: Budget, machine: Machine) -> str:
    """Write a size as the command line takes it, with its path if there is only one."""
    paths = [path.path for path in budget.nvme] or [s.path for s in machine.storage[:1]]
    if tier is Tier.NVME and len(paths) == 1:
        return f"{paths[0]}:{format_bytes_up(nbytes)}"
    return format_bytes_up(nbytes)


def _whole_machine(workload: Workload, machine: Machine, fits: Fits) -> list[str]:
    """Return the flags of the largest budgets that the machine has, if they are enough."""
    whole = parse_budget(machine, ranks=workload.world // machine.machines)
    drive = replace(whole, nvme=(new_path(machine),))
    if fits(workload, whole, machine):
        return ["--hbm auto --dram auto"]
    if fits(workload, drive, with_paths(machine, drive)[0]):
        return [f"--hbm auto --dram auto --nvme {drive.nvme[0].path}:SIZE"]
    return []


def new_path(machine: Machine) -> PathBudget:
    """Return a budget that nothing exceeds, on the machine's first path or on one to be added."""
    path = machine.storage[0].path if machine.storage else _NEW_PATH
    return PathBudget(path=path, nbytes=1024 * TiB)


def _other_changes(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine, fits: Fits
) -> Iterator[str]:
    """Yield flags other than budgets of the machine's own tiers with which the workload fits."""
    if not budget.nvme and not machine.storage:
        more = replace(budget, nvme=(new_path(machine),))
        if fits(workload, more, with_paths(machine, more)[0]):
            yield f"an NVMe drive (--nvme {_NEW_PATH}:SIZE)"
    micro_batch = workload.numerics.micro_batch
    while micro_batch > 1:
        micro_batch //= 2
        numerics = replace(workload.numerics, micro_batch=micro_batch)
        if fits(replace(workload, numerics=numerics), budget, machine):
            yield f"--micro-batch {micro_batch}"
            break
    context = workload.context
    while context // 2 >= SHORTEST_CONTEXT:
        context //= 2
        if fits(resized(workload, inventory, context=context), budget, machine):
            yield f"--context {context}"
            break
