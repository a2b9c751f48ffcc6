"""`penstock fit`: which well-known models can a machine train, and how fast?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.flags import keyword, set_parameters, settings_from_flags, settings_parameters
from penstock.cli.output import AsJson, print_errors, print_json, progress_bar
from penstock.model.known_models import KNOWN_MODELS
from penstock.optimizer_options import TITLES
from penstock.planner import QUICK, PlannerCache, PlanResult, find_plan
from penstock.planner.resource_names import bound_by
from penstock.probe.machine_choice import TargetMachine, machine_to_plan_for
from penstock.settings import Settings
from penstock.tiers import Tier
from penstock.units import GiB, format_seconds

if TYPE_CHECKING:
    from penstock.engine.plan_choice import PlanRequest

SETTINGS = (
    *("batch", "micro_batch", "dtype", "gpus", "transport"),
    *("hbm", "dram", "cxl", "nvme", "moments", "optimizer", "momentum"),
)
"""Settings that the command takes."""

CONTEXTS = (4096, 32768)
"""Contexts of the table, unless others are given."""

TOKENS = 32768
"""Tokens per step and GPU of the table, unless a batch is given."""


@dataclass(frozen=True, slots=True)
class FitRow:
    """One model with one context."""

    model: str
    context: int
    request: PlanRequest | None
    """The request for a plan; None if the model has fewer positions."""
    result: PlanResult | None
    """The plan; None if nothing fits."""

    @property
    def verdict(self) -> str:
        """Whether the model can be trained, in words."""
        if self.request is None:
            return f"max {KNOWN_MODELS[self.model].context:,}"
        if self.result is None:
            return "no"
        return "NVMe" if self.result.plan.peak(Tier.NVME) else "yes"

    @property
    def bottleneck(self) -> str:
        """The kind of resource that limits the step; "" without a plan."""
        return "" if self.result is None else bound_by(self.result.cost.bounds)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON."""
        found: dict[str, Any] = {
            "model": self.model,
            "parameters": KNOWN_MODELS[self.model].inventory(self.model).parameters(),
            "context": self.context,
            "batch": self.request.workload.batch if self.request else None,
            "fits": self.result is not None,
            "positions": KNOWN_MODELS[self.model].context,
        }
        if self.result is not None:
            cost, plan = self.result.cost, self.result.plan
            found |= {
                "tiers": {tier.value: plan.peak(tier) for tier in Tier},
                "step_seconds": cost.step_seconds,
                "tokens_per_second": plan.workload.tokens / cost.step_seconds,
                "bound_by": self.bottleneck,
            }
        return found


def fit_command(**flags: Any) -> None:
    """List well-known models: do they fit on this machine, and how long does a step take?

    Needs no GPU and downloads nothing.
    """
    from penstock.engine.plan_choice import budget_paths

    models, contexts, machine, as_json = (
        flags.pop(name) for name in ("models", "context", "machine", "as_json")
    )
    names = _check_names(models or [])
    settings = settings_from_flags(flags)
    fixed = flags.get("batch") is not None
    target = machine_to_plan_for(machine, budget_paths(settings.memory.budgets))
    with progress_bar("planning", quiet=as_json) as report:
        rows, total = [], len(names) * len(contexts)
        for row in find_rows(names, contexts, settings, target, fixed_batch=fixed):
            rows.append(row)
            report(len(rows), total, row.model)
    requests = [row.request for row in rows if row.request is not None]
    remarks = list(dict.fromkeys(remark for request in requests for remark in request.remarks))
    if as_json:
        print_errors(*remarks)
        print_json([row.to_json() for row in rows])
        return
    console = Console()
    for remark in remarks:
        console.print(remark, style="yellow", markup=False)
    console.print(fit_table(rows, target))
    console.print(_explanation(rows, settings, fixed_batch=fixed), markup=False)


def find_rows(
    names: Sequence[str],
    contexts: Sequence[int],
    settings: Settings,
    target: TargetMachine,
    *,
    fixed_batch: bool,
) -> Iterator[FitRow]:
    """Plan for each model with each context."""
    from penstock.engine.plan_choice import plan_request

    for name in names:
        inventory, cache = KNOWN_MODELS[name].inventory(name), PlannerCache()
        for context in contexts:
            if context > KNOWN_MODELS[name].context:
                yield FitRow(name, context, None, None)
                continue
            sizes: dict[str, Any] = {"context": context}
            if not fixed_batch:
                sizes["batch"] = settings.memory.gpus * max(1, TOKENS // context)
            request = plan_request(inventory, settings.replace(sizes), target)
            yield FitRow(name, context, request, _find_plan(request, cache))


def _find_plan(request: PlanRequest, cache: PlannerCache) -> PlanResult | None:
    """Return a good plan quickly."""
    return find_plan(
        request.inventory, request.workload, request.budget, request.machine, effort=QUICK,
        cache=cache, source=request.source,
    )  # fmt: skip


def fit_table(rows: Sequence[FitRow], target: TargetMachine) -> Table:
    """Show the rows as a table that fits into 80 columns."""
    tiers = [tier for tier in Tier if tier is not Tier.CXL or target.machine.cxl_nodes]
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("model", "size", "context", "fits"):
        table.add_column(name, no_wrap=True)
    for name in (*(tier.value for tier in tiers), "step", "tokens/s"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("limit", no_wrap=True)
    for row in rows:
        inventory = KNOWN_MODELS[row.model].inventory(row.model)
        cells = [row.model, f"{inventory.parameters() / 1e9:.1f}B", f"{row.context:,}"]
        cells.append(row.verdict)
        if row.result is not None:
            plan, cost = row.result.plan, row.result.cost
            cells += [f"{plan.peak(t) / GiB:.0f}" if plan.peak(t) else "" for t in tiers]
            speed = plan.workload.tokens / cost.step_seconds
            cells += [format_seconds(cost.step_seconds), f"{speed:,.0f}", row.bottleneck]
        table.add_row(*cells)
    return table


def _explanation(rows: Sequence[FitRow], settings: Settings, *, fixed_batch: bool) -> str:
    """Say what the figures are, and what to try if something does not fit."""
    gpus = settings.memory.gpus
    batch = "" if fixed_batch else f", {gpus * TOKENS:,} tokens per step"
    optimizer = TITLES[settings.schedule.optimizer]
    text = (
        f"Full fine-tuning with {optimizer}{batch}. Peak memory"
        f"{' of one rank' if gpus > 1 else ''}, in GiB, and step times are predictions; "
        f"docs/planner.md states their error. `penstock plan MODEL` plans one model exactly."
    )
    if any(row.request is not None and row.result is None for row in rows):
        more = "a larger" if settings.memory.nvme else "an NVMe drive:"
        text += f" What does not fit may fit with {more} --nvme PATH:SIZE, or --moments bf16."
    return text


def _check_names(given: Sequence[str]) -> Sequence[str]:
    unknown = [name for name in given if name not in KNOWN_MODELS]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]} is not in the list: {', '.join(KNOWN_MODELS)}. For any other model, run "
            f"`penstock plan` with its directory or Hugging Face id",
            param_hint="MODELS",
        )
    return given or tuple(KNOWN_MODELS)


def _parameters() -> list[Any]:
    models = typer.Argument(help="Models to list (default: all that are known).")
    context = typer.Option("--context", min=2, help="Sequence length in tokens. Repeatable.")
    machine = typer.Option(
        help="Machine file, a preset listed by `penstock machines`, or `this` for this machine "
        "(default: this machine if it has a GPU)."
    )
    return [
        keyword("models", Annotated[list[str] | None, models], None),
        keyword("context", Annotated[list[int], context], list(CONTEXTS)),
        *settings_parameters(SETTINGS),
        keyword("machine", Annotated[str | None, machine], None),
        keyword("as_json", AsJson, False),
    ]


set_parameters(fit_command, _parameters())
