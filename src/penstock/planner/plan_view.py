"""A plan as people and programs read it. Room: show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.errors import InfeasibleError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.plan.plan import Plan
from penstock.planner import PlanResult
from penstock.planner.cost import Cost
from penstock.planner.resource_names import bound_by, long_name, written_per_step
from penstock.tiers import Tier
from penstock.units import format_bytes, format_seconds

BAR_WIDTH = 60
SHADES = " ░▒▓█"

LANES = {
    "compute": "GPU computes",
    "fetch": "weights in",
    "fetch inputs": "inputs in",
    "drain": "gradients out",
    "drain inputs": "inputs out",
    "sweep": "CPU sweeps",
    "read": "NVMe reads",
    "write": "NVMe writes",
}


def plan_json(planned: PlanResult) -> dict[str, Any]:
    """The frozen form that programs read."""
    plan, cost = planned.plan, planned.cost
    return {
        "feasible": True,
        "tiers": {
            tier.value: {
                "budget": plan.budget.of(tier),
                "at_rest": plan.at_rest(tier),
                "peak": plan.peak(tier),
            }
            for tier in Tier
        },
        "step_seconds": cost.step_seconds,
        "tokens_per_second": cost.tokens_per_second,
        "bound_by": bound_by(cost.bounds),
        "bytes_per_parameter": plan.bytes_per_parameter,
        "phases": {
            phase: {tier.value: nbytes for tier, nbytes in most.items()}
            for phase, most in planned.peaks.items()
        },
    }


def infeasible_json(problem: InfeasibleError, budgets: dict[str, int]) -> dict[str, Any]:
    """The same form, with what each tier would need, the others being as they are."""
    return {
        "feasible": False,
        "tiers": {
            tier: {
                "budget": nbytes,
                "at_rest": None,
                "peak": None,
                "least": problem.least.get(tier),
            }
            for tier, nbytes in budgets.items()
        },
        "step_seconds": None,
        "tokens_per_second": None,
        "bound_by": None,
        "bytes_per_parameter": None,
        "phases": None,
    }


def plan_view(planned: PlanResult, machine: Machine) -> RenderableType:
    """The table, the step's time line and the one line that sums it up."""
    plan, cost = planned.plan, planned.cost
    work = plan.workload
    title = (
        f"{plan.model} ({_count(plan.parameters)} parameters) on {plan.machine or 'a machine'}"
        f": {work.batch} x {work.context:,} tokens a step"
    )
    parts: list[RenderableType] = [Text(title, style="bold"), tier_table(plan), Text()]
    parts += [timeline(cost, machine), Text(), Text(summary(planned, machine))]
    if plan.note:
        parts.append(Text(f"Not trainable yet: {plan.note}.", style="yellow"))
    if planned.assumed:
        parts.append(Text(f"Assumed: {'; '.join(planned.assumed)}.", style="dim"))
    return Group(*parts)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def tier_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tier", "budget", "at rest", "peak", "what"):
        table.add_column(name, justify="left" if name in ("tier", "what") else "right")
    for tier in Tier:
        if not plan.budget.of(tier) and not plan.peak(tier):
            continue
        what = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in plan.parts(tier))
        table.add_row(
            tier.value,
            format_bytes(plan.budget.of(tier)),
            format_bytes(plan.at_rest(tier)),
            format_bytes(plan.peak(tier)),
            what or "-",
        )
    return table


def timeline(cost: Cost, machine: Machine, width: int = BAR_WIDTH) -> Table:
    """Each lane of work over one step; the darker, the busier."""
    table = Table(box=None, pad_edge=False, show_header=False)
    turn = round(width * cost.phases["forward"] / cost.step_seconds)
    forward = format_seconds(cost.phases["forward"])
    table.add_row("", f"{'forward ' + forward:<{turn}}|backward".ljust(width)[:width], "busy")
    names = LANES if machine.gpus else LANES | {"compute": "CPU computes"}
    for lane, name in names.items():
        busy = lane_shares(cost, lane, width)
        if any(busy):
            bar = "".join(SHADES[min(4, round(4 * share))] for share in busy)
            table.add_row(name, bar, f"{sum(busy) / width:.0%}")
    return table


def lane_shares(cost: Cost, lane: str, width: int) -> list[float]:
    """How much of each stretch of the step the lane works."""
    busy = [0.0] * width
    step = cost.step_seconds / width
    for operation, span in zip(cost.schedule.operations, cost.spans, strict=True):
        if operation.lane != lane or span.end <= span.start:
            continue
        for k in range(int(span.start / step), min(width, int(span.end / step) + 1)):
            overlap = min(span.end, (k + 1) * step) - max(span.start, k * step)
            busy[k] += max(0.0, overlap) / step
    return [min(1.0, share) for share in busy]


def summary(planned: PlanResult, machine: Machine) -> str:
    plan, cost = planned.plan, planned.cost
    first = next(iter(cost.bounds))
    share = cost.bounds[first] / cost.step_seconds
    lines = [
        f"{format_seconds(cost.step_seconds)} a step, {cost.tokens_per_second:,.0f} tokens/s; "
        f"bound by {long_name(first, machine)} ({share:.0%} of the step)",
        f"{plan.bytes_per_parameter:.2f} bytes a parameter at rest; "
        f"{plan.placement.rounds} round{'s' if plan.placement.rounds > 1 else ''}, "
        f"micro-batch {plan.workload.numerics.micro_batch}, {_sides(plan)}",
    ]
    return "\n".join([*lines, *wear(plan, machine)])


def wear(plan: Plan, machine: Machine) -> list[str]:
    """What a run writes to NVMe, against what the drive is rated for."""
    written = written_per_step(plan)
    if not written:
        return []
    rated = sum(s.rated_writes or 0 for s in machine.storage)
    text = f"writes {written / 1e9:,.0f} GB to NVMe a step"
    if plan.workload.steps:
        whole = written * plan.workload.steps
        text += f", {whole / 1e12:,.1f} TB in {plan.workload.steps:,} steps"
        if rated:
            text += f": {whole / rated:.0%} of the drive's rated life ({rated / 1e12:,.0f} TB)"
    elif rated:
        text += f": {rated // written:,} steps are the drive's rated life ({rated / 1e12:,.0f} TB)"
    return [text]


def explain(planned: PlanResult, inventory: Inventory, name: str) -> RenderableType:
    """One block: where its roles rest, and when its operations run."""
    block = inventory.block(name)
    index = inventory.blocks.index(block)
    at = planned.plan.placement.blocks[index]
    homes = Table("role", "bytes", "where", box=None, pad_edge=False)
    for home in at.homes:
        places = [f"{_place(s.tier, s.node, s.path)} {format_bytes(s.nbytes)}" for s in home.shares]
        homes.add_row(home.role, format_bytes(home.nbytes), ", ".join(places))
    times = Table("starts", "ends", "what", "of", box=None, pad_edge=False)
    for operation, span in zip(planned.cost.schedule.operations, planned.cost.spans, strict=True):
        if operation.block == index and span.end > span.start:
            piece = f" (piece {operation.piece + 1})" if operation.piece is not None else ""
            what = f"{operation.verb}{piece}"
            times.add_row(format_seconds(span.start) if span.start else "0",
                          format_seconds(span.end), what, ", ".join(operation.roles))  # fmt: skip
    sweep = {"cpu": "swept by the CPU", "gpu": "swept on the GPU", "none": "frozen"}[at.sweep]
    title = f"{name}: {block.parameters():,} parameters, {sweep}"
    return Group(Text(title, style="bold"), homes, Text(), times, Text(), phase_table(planned))


def phase_table(planned: PlanResult) -> Table:
    """What each phase of the step has in use, of what the plan takes."""
    used = [tier for tier in Tier if planned.plan.peak(tier)]
    table = Table("in use at most", *(tier.value for tier in used), box=None, pad_edge=False)
    for phase, most in planned.peaks.items():
        table.add_row(phase, *(format_bytes(most[tier]) for tier in used))
    return table


def _place(tier: Tier, node: int | None, path: str) -> str:
    return f"{tier} node {node}" if node is not None else f"{tier} {path}".strip()


def _sides(plan: Plan) -> str:
    sides = [block.sweep for block in plan.placement.blocks if block.homes]
    resident = sides.count("gpu")
    if resident == len(sides):
        return "everything in HBM"
    return f"{resident} of {len(sides)} blocks live in HBM"


def render(parts: Sequence[RenderableType], console: Console | None = None) -> None:
    console = console or Console()
    for part in parts:
        console.print(part)
