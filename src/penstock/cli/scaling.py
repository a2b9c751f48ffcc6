"""The table of `penstock plan --gpus 2,4,8`: how a step scales with the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from penstock.errors import InfeasibleError
from penstock.planner import PlanResult
from penstock.planner.plan_view import plan_json
from penstock.planner.resource_names import long_name
from penstock.tiers import Tier
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.engine.plan_choice import PlanRequest


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A plan for one number of GPUs."""

    request: PlanRequest
    result: PlanResult | None
    """The plan; None if nothing fits."""
    efficiency: float | None
    """Tokens per second and GPU, relative to one GPU; None if that is not known."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of each machine."""
        return self.request.workload.world // self.request.machine.machines

    @property
    def limit(self) -> str:
        """The resource that limits most of the step, in words."""
        if self.result is None:
            return "does not fit"
        return long_name(next(iter(self.result.cost.bounds)), self.request.machine)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON."""
        work = self.request.workload
        row: dict[str, Any] = {
            "gpus": self.gpus,
            "machines": self.request.machine.machines,
            "batch": work.batch,
            "tokens": work.tokens,
            "efficiency": self.efficiency,
        }
        plan = {"feasible": False} if self.result is None else plan_json(self.result)
        return row | plan


def scaling_rows(
    counts: Sequence[int], request_for: Callable[[int], PlanRequest]
) -> Iterator[ScalingRow]:
    """Plan for one GPU, and then for each number of GPUs with as many tokens per GPU."""
    alone: float | None = None
    for count in sorted({1, *counts}):
        request = request_for(count)
        try:
            result = request.make_plan().planned
        except InfeasibleError:
            result = None
        efficiency = None
        if result is not None:
            per_gpu = result.cost.tokens_per_second / request.workload.world
            alone = per_gpu if request.workload.world == 1 else alone
            efficiency = per_gpu / alone if alone is not None else None
        yield ScalingRow(request, result, efficiency)


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """Show the rows as a table."""
    tiers = [
        tier for tier in Tier
        if tier is not Tier.HBM and any(row.result and row.result.plan.peak(tier) for row in rows)
    ]  # fmt: skip
    table = Table(box=None, pad_edge=False)
    names = ["GPUs", "batch", "step", "tokens/s", "efficiency", "hbm per GPU"]
    for name in (*names, *(f"{tier.value} per machine" for tier in tiers)):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    for row in rows:
        work = row.request.workload
        cells = [str(row.gpus), str(work.batch)]
        if row.result is not None:
            cost, plan = row.result.cost, row.result.plan
            relative = "-" if row.efficiency is None else f"{row.efficiency:.2f}"
            cells += [format_seconds(cost.step_seconds), f"{cost.tokens_per_second:,.0f}"]
            cells += [relative, format_bytes(plan.peak(Tier.HBM))]
            cells += [format_bytes(plan.ranks.local * plan.peak(tier)) for tier in tiers]
            share = next(iter(cost.bounds.values())) / cost.step_seconds
            cells.append(f"{row.limit} ({share:.0%})")
        else:
            cells += ["-"] * (4 + len(tiers)) + [row.limit]
        table.add_row(*cells)
    return table


def scaling_note(rows: Sequence[ScalingRow]) -> str:
    """Say what the table compares, and how the ranks reach each other."""
    ways = {
        row.result.plan.placement.transport for row in rows if row.result and row.gpus > 1
    }  # fmt: skip
    how = " and ".join(sorted(way for way in ways if way)) or "none"
    return (
        f"Every GPU has the same number of tokens in each row. Efficiency is tokens per second and "
        f"GPU, relative to one GPU. Transport: {how}."
    )
