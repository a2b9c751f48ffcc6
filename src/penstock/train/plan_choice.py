"""Choose the plan of a run: the best one for its budgets, or the one in a file."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.plan_choice import (
    PlanChoice,
    budget_paths,
    check_plan,
    clear_budget_paths,
    plan_request,
)
from penstock.errors import SettingsError
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload
from penstock.probe.machine_choice import this_machine
from penstock.settings import Settings
from penstock.train.inputs import ModelSource
from penstock.train.resume import ResumePoint, resumed_numerics
from penstock.units import format_bytes_up


def choose_plan(
    settings: Settings,
    model: ModelSource,
    steps: int,
    resume: ResumePoint | None,
    machines: int = 1,
) -> tuple[PlanChoice, tuple[str, ...]]:
    """Make the best plan for the budgets, or load and check the plan that the settings name.

    A resumed run keeps the numerics of its checkpoint, even with other budgets. The run has as many
    `machines` like this one. Returns the plan and remarks for the user.
    """
    path = settings.memory.plan
    plan = None if path is None else Plan.load(path)
    budget = settings.memory.budgets if plan is None else plan.budget
    notes = clear_budget_paths(budget)
    target = this_machine(paths=budget_paths(budget))
    if path is not None and plan is not None:
        choice = check_plan(plan, model.inventory, target, path=path)
        _check_settings(settings, path)
        return choice, notes
    request = plan_request(
        model.inventory, settings, target, config=model.config, steps=steps,
        machines=machines,
    )  # fmt: skip
    numerics = resumed_numerics(request.workload.numerics, resume, settings)
    request = replace(request, workload=replace(request.workload, numerics=numerics))
    return request.make_plan(), (*request.remarks, *notes)


def plan_layer(path: str) -> dict[str, object]:
    """Return the settings that a plan file fixes, by field name."""
    plan = Plan.load(path)
    workload = plan.workload
    return {
        "gpus": len(plan.seats) or workload.world,
        "context": workload.context,
        "batch": workload.batch,
        "optimizer": workload.optimizer,
        "moments": workload.moments,
        "dtype": workload.dtype,
        "clip": workload.clip or 0.0,
        "micro_batch": str(workload.numerics.micro_batch),
        "deterministic": workload.numerics.deterministic,
        "label_smoothing": workload.numerics.label_smoothing,
        "neftune_noise_alpha": workload.numerics.neftune_noise_alpha,
        "quantize": workload.numerics.quantize,
    }


def describe_budget(budget: Budget, workload: Workload) -> list[str]:
    """Describe what `auto` was resolved to."""
    sizes = [f"hbm {format_bytes_up(budget.hbm)}", f"dram {format_bytes_up(budget.dram)}"]
    sizes += [f"cxl {format_bytes_up(budget.cxl)}"] if budget.cxl else []
    sizes += [f"nvme {path.path}:{format_bytes_up(path.nbytes)}" for path in budget.nvme]
    return [f"budget: {', '.join(sizes)}", f"micro-batch {workload.numerics.micro_batch}"]


def _check_settings(settings: Settings, path: str) -> None:
    values = settings.flat()
    for name, planned in plan_layer(path).items():
        if values[name] != planned:
            raise SettingsError(
                name,
                f"is {values[name]}, but the plan {path} is for {planned}; make a new plan, or "
                f"leave the setting out",
            )
