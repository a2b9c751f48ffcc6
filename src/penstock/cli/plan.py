"""`penstock plan` and `penstock machines`. Room: show.

Functions ready for typer; `cli.py` gives them their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from penstock import records
from penstock.errors import InfeasibleError, PenstockError, PlanError
from penstock.machine.machine import Machine
from penstock.machine.presets import DEFAULT, preset, preset_names
from penstock.machine.probe_cache import cache_path
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, parse_budget, with_paths
from penstock.plan.workload import Numerics, Workload, default_numerics
from penstock.planner import make_plan
from penstock.planner.advice import Advice, Point, Question, advise, plot, vary
from penstock.planner.plan_view import explain, infeasible_json, plan_json, plan_view
from penstock.roles import Dtype, Moments
from penstock.tiers import Tier
from penstock.units import format_bytes, format_seconds, parse_bytes

VARY_POINTS = 8

Option = typer.Option


def plan_command(
    model: Annotated[str, typer.Argument(help="A directory with config.json, or a hub id.")],
    context: Annotated[int, Option(help="Tokens in a sequence.")] = 4096,
    batch: Annotated[int, Option(help="Sequences per optimizer step.")] = 8,
    hbm: Annotated[str, Option(help="Of the GPU: a size such as 22GiB, or auto.")] = "auto",
    dram: Annotated[str, Option(help="Of memory with CPUs.")] = "auto",
    cxl: Annotated[str, Option(help="Of CXL memory.")] = "auto",
    nvme: Annotated[list[str] | None, Option(help="PATH:SIZE; may be given again.")] = None,
    machine: Annotated[str | None, Option(help="A machine file, or a bundled name.")] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="Write the plan here.")] = None,
    moments: Annotated[str, Option(help="fp32 (exact), bf16 or int8.")] = "fp32",
    dtype: Annotated[str, Option(help="bf16 or fp16.")] = "bf16",
    micro_batch: Annotated[int | None, Option(help="Sequences computed at once.")] = None,
    clip: Annotated[float, Option(help="Largest gradient norm; 0 for none.")] = 1.0,
    steps: Annotated[int | None, Option(help="Of the run, to tell the drive's wear.")] = None,
    freeze: Annotated[list[str] | None, Option(help="A pattern of tensors not trained.")] = None,
    blocks: Annotated[str | None, Option(help="Where the layers are: model.layers.")] = None,
    vary_: Annotated[str | None, Option("--vary", help="Such as dram=16GiB..128GiB.")] = None,
    explain_: Annotated[str | None, Option("--explain", help="One block in full.")] = None,
    as_json: Annotated[bool, Option("--json", help="For programs.")] = False,
) -> None:
    """Say what will rest where, how long a step takes and what bounds it. Needs no GPU."""
    console = Console()
    chosen, about_machine = find_machine(machine)
    inventory = _survey(model, blocks, freeze or [])
    budget = parse_budget(chosen, hbm=hbm, dram=dram, cxl=cxl, nvme=tuple(nvme or ()))
    chosen, about_disks = with_paths(chosen, budget)
    for remark in filter(None, () if as_json else (about_machine, about_disks)):
        console.print(remark, style="yellow")
    numerics = _numerics(inventory, chosen, context, batch, micro_batch)
    kinds = {
        "dtype": _one_of("dtype", dtype, Dtype),
        "moments": _one_of("moments", moments, Moments),
    }
    workload = Workload(
        context=context, batch=batch, clip=clip or None, steps=steps, numerics=numerics, **kinds
    )
    answer = _Answer(output, explain_, vary_, as_json)
    answer.give(console, inventory, workload, budget, chosen)


@dataclass(frozen=True, slots=True)
class _Answer:
    """How the user wants to be told."""

    output: Path | None
    """Where the plan goes."""

    block: str | None
    """One block in full."""

    curve: str | None
    """A tier and its range."""

    as_json: bool
    """For programs."""

    def give(
        self,
        console: Console,
        inventory: Inventory,
        workload: Workload,
        budget: Budget,
        machine: Machine,
    ) -> None:
        try:
            planned = make_plan(inventory, workload, budget, machine)
        except InfeasibleError as problem:
            _tell_infeasible(console, problem, budget, self.as_json)
            raise typer.Exit(1) from None
        if self.output is not None:
            planned.plan.save(self.output)
        if self.as_json:
            print(json.dumps(plan_json(planned)))
            return
        console.print(plan_view(planned, machine))
        question = Question(inventory, workload, budget, machine, planned)
        if self.block:
            console.print(explain(planned, inventory, self.block))
        elif self.curve:
            _show_curve(console, question, self.curve)
        else:
            console.print(advice_text(advise(question)))


def _numerics(
    inventory: Inventory, machine: Machine, context: int, batch: int, micro_batch: int | None
) -> Numerics:
    """As a run on that machine would have them: a GPU has compiled bodies."""
    kernels = bool(machine.gpus)
    return default_numerics(
        inventory, context=context, batch=batch, micro_batch=micro_batch, kernels=kernels
    )


def _survey(model: str, blocks: str | None, freeze: list[str]) -> Inventory:
    from penstock.model.survey import survey  # brings transformers, which takes seconds

    return survey(model, blocks=blocks, freeze=tuple(freeze))


def machines_command(
    as_json: Annotated[bool, Option("--json", help="For programs.")] = False,
) -> None:
    """List the machine files that come with Penstock, each with its source."""
    if as_json:
        print(json.dumps({name: records.to_json(preset(name)) for name in preset_names()}))
        return
    table = Table("name", "HBM", "DRAM", "CXL", "source", box=None, pad_edge=False)
    for name in preset_names():
        machine = preset(name)
        table.add_row(
            name,
            format_bytes(machine.gpus[0].memory or 0),
            format_bytes(sum(node.capacity for node in machine.dram_nodes)),
            format_bytes(sum(node.capacity for node in machine.cxl_nodes)),
            machine.made.by,
        )
    Console().print(table)


# The machine.


def find_machine(
    name: str | None, probe_here: Callable[[], Machine] | None = None
) -> tuple[Machine, str]:
    """The machine to plan for, and what to say about the choice."""
    if name is not None:
        if name in preset_names():
            return preset(name), ""
        if Path(name).is_file():
            return Machine.load(name), ""
        listed = ", ".join(preset_names())
        raise PlanError("machine", f"{name} is neither a file nor a bundled machine ({listed})")
    cached = cache_path()
    if cached.is_file():
        here = Machine.load(cached)
    else:
        here = (probe_here or _probe_here)()
        cached.parent.mkdir(parents=True, exist_ok=True)
        here.save(cached)
    if not here.gpus:
        return preset(DEFAULT), (
            f"No GPU here: planning for the bundled machine {DEFAULT} (`penstock machines`)."
        )
    return here, f"Planning for this machine, as probed ({cached})."


def _probe_here() -> Machine:
    """A quick measurement; where there is no GPU, only a look."""
    from penstock.machine.discovery import discover
    from penstock.probe import ProbeOptions, probe

    found = discover()
    return probe(ProbeOptions(quick=True)).machine if found.gpus else found


# Words and pictures.


def advice_text(advices: list[Advice]) -> str:
    if not advices:
        return "What would help most: nothing within reach."
    told = "; ".join(f"{advice.what}: {advice.gain}" for advice in advices)
    return f"What would help most: {told}"


def parse_vary(text: str) -> tuple[Tier, list[int]]:
    """`dram=16GiB..128GiB` as a tier and sizes from one to the other."""
    match = re.fullmatch(r"\s*(\w+)\s*=\s*([^.]+(?:\.\d+[^.]*)?)\.\.(.+)", text)
    if match is None or match[1] not in list(Tier):
        tiers = ", ".join(Tier)
        raise PlanError("vary", f"must be such as dram=16GiB..128GiB ({tiers}), got {text!r}")
    try:
        low, high = parse_bytes(match[2].strip()), parse_bytes(match[3].strip())
    except ValueError as wrong:
        raise PlanError("vary", str(wrong)) from None
    if not 0 <= low < high:
        raise PlanError("vary", f"must rise, got {text!r}")
    step = (high - low) / (VARY_POINTS - 1)
    return Tier(match[1]), [round(low + k * step) for k in range(VARY_POINTS)]


def _show_curve(console: Console, question: Question, text: str) -> None:
    tier, sizes = parse_vary(text)
    points = vary(question, tier, sizes)
    console.print(curve_table(points, tier))
    path = Path(f"plan-{tier.value}.png")
    plot(points, tier, path)
    console.print(f"Drawn in {path}")


def curve_table(points: list[Point], tier: Tier) -> Table:
    table = Table(f"{tier.value} budget", "step", "", box=None, pad_edge=False)
    slowest = max((p.step_seconds or 0.0 for p in points), default=0.0)
    for point in points:
        if point.step_seconds is None:
            table.add_row(format_bytes(point.nbytes), "does not fit", "")
        else:
            bar = "█" * max(1, round(40 * point.step_seconds / slowest))
            table.add_row(format_bytes(point.nbytes), format_seconds(point.step_seconds), bar)
    return table


def _tell_infeasible(
    console: Console, problem: InfeasibleError, budget: Budget, as_json: bool
) -> None:
    if as_json:
        print(json.dumps(infeasible_json(problem, {t.value: budget.of(t) for t in Tier})))
    else:
        console.print(f"error: {problem}", style="red", markup=False)


def _one_of(name: str, text: str, kinds: object) -> Any:
    choices = get_args(kinds)
    if text not in choices:
        raise PenstockError(f"--{name} must be {', '.join(choices)}, got {text!r}")
    return text
