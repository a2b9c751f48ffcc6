"""The plan of a run: made for its budgets, or the one it was given. Room: show."""

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
from penstock.probe.this_machine import machine_for_training
from penstock.settings import Settings
from penstock.storage.leftovers import find_stores, remove_store
from penstock.train.inputs import Model
from penstock.train.resume import Past, kept_numerics


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan and what is known of it."""

    plan: Plan
    machine: Machine
    planned: PlanResult | None
    """With its cost; None for a plan from a file."""

    remark: str = ""
    """What to say about where the machine's speeds are from."""

    @property
    def bound(self) -> str:
        """What a step is expected to wait for most."""
        if self.planned is None:
            return ""
        return long_name(next(iter(self.planned.cost.bounds)), self.machine)


def choose_plan(settings: Settings, model: Model, steps: int, past: Past | None) -> Chosen:
    """The best for the budgets; numerics are the past's, where there is one."""
    machine, remark = machine_for_training()
    if settings.memory.plan is not None:
        plan = Plan.load(settings.memory.plan)
        plan.check_model(model.inventory)
        machine, _ = with_paths(machine, plan.budget)
        plan.check(machine)
        _check_plan(settings, plan)
        return Chosen(plan, machine, None)
    budget = budget_for(machine, settings.memory.budgets)
    _check_disks(budget)
    clear_leftovers(budget)
    workload = workload_for(model.inventory, settings, steps=steps)
    workload = replace(workload, numerics=kept_numerics(workload.numerics, past, settings))
    planned, machine = make_plan_with_paths(model.inventory, workload, budget, machine)
    return Chosen(planned.plan, machine, planned, remark)


def plan_layer(path: str) -> dict[str, object]:
    """What a plan file says that settings say too."""
    work = Plan.load(path).workload
    return {
        "context": work.context,
        "batch": work.batch,
        "moments": work.moments,
        "dtype": work.dtype,
        "clip": work.clip or 0.0,
        "micro_batch": str(work.numerics.micro_batch),
        "deterministic": work.numerics.deterministic,
    }


def _check_plan(settings: Settings, plan: Plan) -> None:
    assert settings.memory.plan is not None
    values = settings.flat()
    for name, planned in plan_layer(settings.memory.plan).items():
        now = values[name]
        if now != planned:
            raise SettingsError(
                name,
                f"is {now}, but the plan {settings.memory.plan} is for {planned}; make a new plan, "
                f"or leave the setting out",
            )


def _check_disks(budget: Budget) -> None:
    """Also those that the plan will not need: a path that was mistyped is not meant."""
    for disk in budget.nvme:
        if not Path(disk.path).is_dir() and not Path(disk.path).is_block_device():
            raise SettingsError("nvme", f"{disk.path} is neither a directory nor a block device")


def clear_leftovers(budget: Budget) -> None:
    """What killed runs left on the disks that this one may use."""
    directories = [Path(path.path) for path in budget.nvme if Path(path.path).is_dir()]
    for store in find_stores(directories):
        if store.state == "left":
            remove_store(store)


def describe_budget(budget: Budget, work: Workload) -> list[str]:
    """What became of `auto`, in bytes."""
    from penstock.units import format_bytes_up

    rows = [f"hbm {format_bytes_up(budget.hbm)}", f"dram {format_bytes_up(budget.dram)}"]
    rows += [f"cxl {format_bytes_up(budget.cxl)}"] if budget.cxl else []
    rows += [f"nvme {path.path}:{format_bytes_up(path.nbytes)}" for path in budget.nvme]
    return [f"budget: {', '.join(rows)}", f"micro-batch {work.numerics.micro_batch}"]
