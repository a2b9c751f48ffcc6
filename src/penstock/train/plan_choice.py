"""Choose the plan of a run: the best one for its budgets, or the one in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.engine.prepare import budget_for, make_plan_with_paths, workload_for
from penstock.errors import SettingsError
from penstock.machine.machine import Machine
from penstock.plan.budget import Budget, with_paths
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload
from penstock.planner import PlanResult
from penstock.planner.resource_names import long_name
from penstock.probe.machine_choice import machine_for_training
from penstock.settings import Settings
from penstock.storage.leftovers import find_stores, remove_store
from penstock.train.inputs import ModelSource
from penstock.train.resume import ResumePoint, resumed_numerics
from penstock.units import format_bytes_up


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The plan of a run, and the machine it is for."""

    plan: Plan
    machine: Machine
    planned: PlanResult | None
    """The plan with its estimated cost; None for a plan from a file."""

    remark: str = ""
    """Source of the machine's rates."""

    @property
    def bottleneck(self) -> str:
        """Name of the resource that limits the step, as estimated; "" if unknown."""
        if self.planned is None:
            return ""
        return long_name(next(iter(self.planned.cost.bounds)), self.machine)


def choose_plan(
    settings: Settings, model: ModelSource, steps: int, resume: ResumePoint | None
) -> PlanChoice:
    """Make the best plan for the budgets, or load and check the plan that the settings name.

    A resumed run keeps the numerics of its checkpoint, even with other budgets.
    """
    machine, remark = machine_for_training()
    if settings.memory.plan is not None:
        plan = Plan.load(settings.memory.plan)
        plan.check_model(model.inventory)
        machine, _ = with_paths(machine, plan.budget)
        plan.check(machine)
        _check_settings(settings, settings.memory.plan)
        return PlanChoice(plan, machine, None)
    budget = budget_for(machine, settings.memory.budgets)
    _check_disks(budget)
    remove_leftover_stores(budget)
    workload = workload_for(model.inventory, settings, steps=steps)
    numerics = resumed_numerics(workload.numerics, resume, settings)
    workload = replace(workload, numerics=numerics)
    planned, machine = make_plan_with_paths(model.inventory, workload, budget, machine)
    return PlanChoice(planned.plan, machine, planned, remark)


def plan_layer(path: str) -> dict[str, object]:
    """Return the settings that a plan file fixes, by field name."""
    workload = Plan.load(path).workload
    return {
        "context": workload.context,
        "batch": workload.batch,
        "moments": workload.moments,
        "dtype": workload.dtype,
        "clip": workload.clip or 0.0,
        "micro_batch": str(workload.numerics.micro_batch),
        "deterministic": workload.numerics.deterministic,
    }


def describe_budget(budget: Budget, workload: Workload) -> list[str]:
    """Describe what `auto` was resolved to."""
    sizes = [f"hbm {format_bytes_up(budget.hbm)}", f"dram {format_bytes_up(budget.dram)}"]
    sizes += [f"cxl {format_bytes_up(budget.cxl)}"] if budget.cxl else []
    sizes += [f"nvme {path.path}:{format_bytes_up(path.nbytes)}" for path in budget.nvme]
    return [f"budget: {', '.join(sizes)}", f"micro-batch {workload.numerics.micro_batch}"]


def remove_leftover_stores(budget: Budget) -> None:
    """Remove what killed runs left on the disks that this run may use."""
    directories = [Path(path.path) for path in budget.nvme if Path(path.path).is_dir()]
    for store in find_stores(directories):
        if store.state == "left":
            remove_store(store)


def _check_settings(settings: Settings, path: str) -> None:
    values = settings.flat()
    for name, planned in plan_layer(path).items():
        if values[name] != planned:
            raise SettingsError(
                name,
                f"is {values[name]}, but the plan {path} is for {planned}; make a new plan, or "
                f"leave the setting out",
            )


def _check_disks(budget: Budget) -> None:
    """Check every path, even one that the plan will not use: it may be mistyped."""
    for disk in budget.nvme:
        if not Path(disk.path).is_dir() and not Path(disk.path).is_block_device():
            raise SettingsError("nvme", f"{disk.path} is neither a directory nor a block device")
