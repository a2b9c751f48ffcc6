"""`penstock plan`: plan a run, on any machine."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.flags import (
    MissingSettingError,
    flag_name,
    given_settings,
    keyword,
    set_parameters,
    settings_parameters,
)
from penstock.cli.output import AsJson, print_errors, progress_bar
from penstock.cli.scaling import ScalingRow, scaling_note, scaling_rows, scaling_table
from penstock.errors import InfeasibleError, MachineError, PlanError, SettingsError
from penstock.model.freeze import check_freeze
from penstock.model.known_models import HUB_IDS, KNOWN_MODELS
from penstock.plan.budget import tier_capacity
from penstock.plan.memory_interpolation import interpolated
from penstock.planner.advice import Advice, BudgetPoint, WhatIf, advise, plot, vary
from penstock.planner.plan_view import explain, infeasible_json, plan_json, plan_view
from penstock.probe.machine_choice import THIS, machine_to_plan_for
from penstock.records import named_by
from penstock.settings import GROUP_OF, Layer, Settings, merge_layers, read_yaml
from penstock.tiers import Tier
from penstock.units import format_bytes, format_seconds, parse_memory

if TYPE_CHECKING:
    from penstock.engine.plan_choice import PlanRequest
    from penstock.model.inventory import Inventory

VARY_POINTS = 8
"""Number of budgets that --vary plans for."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
"""Formats of the plot of --vary."""

SETTINGS = (
    *("model", "revision", "trust_remote_code", "model_config", "dtype", "freeze", "lora"),
    *("quantize", "blocks"),
    *("data", "data_weights", "columns", "streaming", "skip_bad_lines", "cache"),
    *("context", "overlong", "eval_split"),
    *("batch", "micro_batch", "epochs", "steps", "clip", "deterministic", "seed"),
    *("label_smoothing", "neftune_noise_alpha", "optimizer", "momentum"),
    *("hbm", "dram", "cxl", "nvme", "moments", "transport"),
)
"""Settings that a plan depends on. `--gpus` is a flag of its own: it takes several numbers."""

IGNORED = tuple(sorted(GROUP_OF.keys() - {*SETTINGS, "gpus", "plan"}))
"""Other settings of a run. They are accepted, so that `train` in a command line may be replaced by
`plan`, and checked."""


def plan_command(**flags: Any) -> None:
    """Show where everything is stored, the time of a step and its bottleneck. Needs no GPU."""
    from penstock.engine.plan_choice import budget_paths, plan_request

    name, machines = flags.pop("machine"), flags.pop("machines")
    counts = parse_gpus(flags.pop("gpus"))
    output = _Output(*(flags.pop(flag) for flag in ("output", "explain_", "vary_", "as_json")))
    output.check(several=len(counts) > 1)
    console = Console()
    reads_data = bool(flags.get("data"))
    ignored = [flag_name(name) for name in given_settings(flags) if name in IGNORED]
    settings = _merge_settings(flags | ({"gpus": counts[0]} if len(counts) == 1 else {}))
    config, inventory = _inspect_model(settings, name)
    # `penstock train` computes the loss itself.
    inventory = replace(inventory, not_trainable=inventory.not_trainable or inventory.own_loss)
    check_freeze(inventory, settings.model.freeze)
    _check_files(settings, inventory)

    def note(text: str) -> None:
        if output.as_json:
            print_errors(text)
        else:
            console.print(text, style="yellow", markup=False)

    if ignored:
        note(f"Not used: {', '.join(ignored)}, on which the plan does not depend.")
    if _is_known_by_size(settings.model.model):
        note(_check_known(settings, output.path))
    settings, steps = _with_sizes(settings, config, inventory, note, reads_data=reads_data)
    # After the model is inspected, as in training: the imports have used memory by then.
    target = machine_to_plan_for(name, budget_paths(settings.memory.budgets))

    def request_for(chosen: Settings, of: int | None = machines) -> PlanRequest:
        return plan_request(inventory, chosen, target, config=config, steps=steps, machines=of)

    with named_by(name or THIS, MachineError):  # what a plan needs of the machine may be missing
        if len(counts) > 1:
            output.show_rows(console, _scaling_rows(settings, counts, request_for, machines, note))
        else:
            request = request_for(settings)
            for remark in request.remarks:
                note(remark)
            output.show(console, request)
    if inventory.not_trainable:  # after the plan, which says so
        raise typer.Exit(1)


def parse_gpus(text: str | None) -> list[int]:
    """Parse `2,4,8`; return no number if none is given."""
    if text is None:
        return []
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise typer.BadParameter(
            f"must be a number of GPUs, or several such as 2,4,8, got {text}", param_hint="--gpus"
        )
    return counts


def _scaling_rows(
    settings: Settings,
    counts: list[int],
    request_for: Callable[[Settings, int | None], PlanRequest],
    machines: int | None,
    note: Callable[[str], None],
) -> list[ScalingRow]:
    """Plan for several numbers of GPUs, with as many tokens per GPU."""
    batch = settings.schedule.chosen_batch
    remarks: list[str] = []

    def request(count: int) -> PlanRequest:
        several = 1 if count == 1 else machines or 1
        sizes = {"gpus": count, "batch": batch * count * several}
        made = request_for(settings.replace(sizes), several)
        remarks.extend(made.remarks)
        return made

    rows = list(scaling_rows(counts, request))
    for remark in dict.fromkeys(remarks):
        note(remark)
    return rows


def _with_sizes(
    settings: Settings,
    config: Any,
    inventory: Inventory,
    note: Callable[[str], None],
    *,
    reads_data: bool,
) -> tuple[Settings, int | None]:
    """Return the settings with a context and a batch, and the number of steps if it is known.

    With --data they are those of `penstock train`. The data that a file names, such as the run.yaml
    of another machine, is read only if the file lacks the sizes.
    """
    given = {"context": settings.data.context, "batch": settings.schedule.batch}
    missing = [name for name, value in given.items() if value is None]
    if reads_data or (settings.data.data and missing):
        from penstock.train.inputs import ModelSource, load_data

        model = ModelSource(settings.model.model, config, inventory)
        with progress_bar("reading", quiet=False) as report:
            chosen, data = load_data(settings, model, note, report)
        return chosen, data.batches(chosen).steps
    chosen = settings.with_assumed_sizes(inventory.max_context)
    if missing:
        assumed = {"context": chosen.data.context, "batch": chosen.schedule.batch}
        listed = " and ".join(f"{name} {assumed[name]:,}" for name in missing)
        note(f"Assumed: {listed}. `penstock train` fits sizes to its data; pass --data here, too.")
    return chosen, None


def _inspect_model(settings: Settings, machine: str | None) -> tuple[Any, Inventory]:
    """Return the model's config and inventory, if possible without importing transformers."""
    from penstock.engine.model_source import adapter_of, inspect_model
    from penstock.model.survey_cache import cached_survey

    if _is_known_by_size(settings.model.model):
        return None, KNOWN_MODELS[settings.model.model].inventory(settings.model.model)
    if machine in (None, THIS) and "auto" in settings.memory.budgets.values():
        # The budget is what is free, and training has imported transformers when it asks for that.
        return inspect_model(settings.model.model, settings)
    chosen = settings.model
    return cached_survey(
        chosen.model,
        revision=chosen.revision,
        changes=chosen.model_config,
        blocks=chosen.blocks,
        freeze=chosen.freeze,
        trust_remote_code=chosen.trust_remote_code,
        adapter=adapter_of(chosen.model, settings),
    )


def _is_known_by_size(model: str) -> bool:
    """Return whether a model is named as in `penstock fit`, and not a directory."""
    return model in KNOWN_MODELS and not Path(model).exists()


def _check_known(settings: Settings, output: Path | None) -> str:
    """Return a remark about a model of which only the sizes are known.

    Raises SettingsError for what needs its files.
    """
    name, chosen = settings.model.model, settings.model
    for flag, value in (
        ("lora", chosen.lora), ("freeze", chosen.freeze), ("model_config", chosen.model_config),
        ("blocks", chosen.blocks), ("data", settings.data.data), ("output", output),
    ):  # fmt: skip
        if value:
            raise SettingsError(
                flag,
                f"needs the model's files, and {name} is a name of `penstock fit`, which knows "
                f"only sizes; pass its Hub ID {HUB_IDS[name]}, or a directory with the model",
            )
    return (
        f"Planned with the published sizes of {HUB_IDS[name]} and an estimate of working memory; "
        f"pass that ID to plan with its config."
    )


def _check_files(settings: Settings, inventory: Inventory) -> None:
    """Raise an error if the model's directory has weights that training would refuse.

    A directory with only a config can be planned for as well, and so can a model that cannot be
    trained: its plan says so.
    """
    if inventory.not_trainable:
        return
    folder = Path(settings.model.model)
    if settings.model.init == "pretrained" and any(folder.glob("model*.safetensors*")):
        from penstock.engine.model_source import adapter_of, check_weights

        check_weights(folder, inventory, adapter_of(folder, settings))


def _merge_settings(flags: dict[str, Any]) -> Settings:
    """Merge, weakest first: defaults, --config, the command line."""
    config = flags.pop("config")
    layers: list[tuple[str, Layer]] = [("", given_settings(flags))]
    if config is not None:
        layers.insert(0, (str(config), read_yaml(config)))
    settings = merge_layers(layers)
    if not settings.model.model:
        raise MissingSettingError("model")
    if settings.memory.plan is not None:
        raise SettingsError(
            "plan",
            f"is {settings.memory.plan}, which training follows as it is; leave it out to make a "
            f"new plan",
            where=str(config),
        )
    return settings


@dataclass(frozen=True, slots=True)
class _Output:
    """The output of `penstock plan`."""

    path: Path | None
    """File to write the plan to, or the plot of --vary."""

    block: str | None
    """Name of a block to show in detail."""

    curve: str | None
    """Tier and range of budgets to plan for, such as `dram=16GiB..128GiB`."""

    as_json: bool
    """Whether to print JSON only."""

    def check(self, *, several: bool) -> None:
        """Refuse wrong options before the model is inspected and planned for.

        `several` says whether there are several plans, which are shown as a table.
        """
        for flag, value in (("-o", self.path), ("--explain", self.block), ("--vary", self.curve)):
            if several and value:
                raise typer.BadParameter(
                    "takes one number of GPUs; give --gpus only one", param_hint=flag
                )
        if self.curve is not None:
            parse_vary(self.curve)
            if self.path is not None and self.path.suffix not in PLOT_SUFFIXES:
                raise typer.BadParameter(
                    f"with --vary, it names the plot: {', '.join(PLOT_SUFFIXES)}; got {self.path}",
                    param_hint="--output",
                )
        chosen = [("--explain", self.block), ("--vary", self.curve), ("--json", self.as_json)]
        names = [name for name, value in chosen if value]
        if len(names) > 1:
            raise typer.BadParameter("choose one of them", param_hint=" and ".join(names))

    def show_rows(self, console: Console, rows: list[ScalingRow]) -> None:
        """Show plans for several numbers of GPUs. Exit with code 1 if nothing fits any of them."""
        if self.as_json:
            print(json.dumps([row.to_json() for row in rows]))
        else:
            console.print(scaling_table(rows))
            console.print(scaling_note(rows), highlight=False)
        if all(row.result is None for row in rows):
            raise typer.Exit(1)

    def show(self, console: Console, request: PlanRequest) -> None:
        """Make the plan and show it. Exit with code 1 if nothing fits the budgets."""
        try:
            choice = request.make_plan()
        except InfeasibleError as problem:
            # Other budgets of the range may be enough.
            if self.curve is not None and _show_curve(console, request, self.curve, self.path):
                console.print(f"note: {problem}", style="yellow", markup=False)
                return
            _show_infeasible(console, problem, request, self.as_json)
            raise typer.Exit(1) from None
        planned = choice.planned
        assert planned is not None
        if self.path is not None and not self.curve:
            planned.plan.save(self.path)
        if self.as_json:
            print(json.dumps(plan_json(planned)))
            return
        console.print(plan_view(planned, choice.machine))
        if self.block:
            console.print(explain(planned, request.inventory, self.block))
        elif self.curve:
            _show_curve(console, request, self.curve, self.path)
        else:
            what_if = WhatIf(
                request.inventory, request.workload, request.budget, request.machine, planned,
                interpolated(request.source, request.workload),
            )  # fmt: skip
            console.print(advice_text(advise(what_if)))


def advice_text(advices: list[Advice]) -> str:
    """Say in one line which changes would speed up the step most."""
    if not advices:
        return "What would help most: no change within reach."
    listed = "; ".join(f"{advice.what}: {advice.gain}" for advice in advices)
    return f"What would help most: {listed}"


def parse_vary(text: str) -> tuple[Tier, list[int]]:
    """Parse `dram=16GiB..128GiB` into a tier and evenly spaced sizes."""
    match = re.fullmatch(r"\s*(\w+)\s*=\s*([^.]+(?:\.\d+[^.]*)?)\.\.(.+)", text)
    if match is None or match[1] not in list(Tier):
        tiers = ", ".join(Tier)
        raise PlanError(
            "vary", f"must have the form dram=16GiB..128GiB, with one of {tiers}; got {text!r}"
        )
    try:
        low, high = parse_memory(match[2].strip()), parse_memory(match[3].strip())
    except ValueError as wrong:
        raise PlanError("vary", str(wrong)) from None
    if not 0 <= low < high:
        raise PlanError("vary", f"must go from a smaller to a larger size, got {text!r}")
    step = (high - low) / (VARY_POINTS - 1)
    return Tier(match[1]), [round(low + k * step) for k in range(VARY_POINTS)]


def curve_table(points: list[BudgetPoint], tier: Tier) -> Table:
    """Show the step time for each budget as a table with bars."""
    table = Table(f"{tier.value} budget", "step", "", box=None, pad_edge=False)
    slowest = max((p.step_seconds or 0.0 for p in points), default=0.0)
    for point in points:
        if point.step_seconds is None:
            table.add_row(format_bytes(point.nbytes), "does not fit", "")
        else:
            bar = "█" * max(1, round(40 * point.step_seconds / slowest))
            table.add_row(format_bytes(point.nbytes), format_seconds(point.step_seconds), bar)
    return table


def _show_curve(console: Console, request: PlanRequest, text: str, out: Path | None) -> bool:
    """Show the step time over a range of budgets; return whether any of them is enough."""
    tier, sizes = parse_vary(text)
    machine = request.machine
    points = vary(
        request.inventory, request.workload, request.budget, machine, tier, sizes,
        source=request.source,
    )  # fmt: skip
    console.print(curve_table(points, tier))
    if all(point.step_seconds is None for point in points):
        return False
    capacity = tier_capacity(machine, request.budget, tier)
    if tier is not Tier.NVME and capacity is not None and max(sizes) > capacity:
        console.print(
            f"Budgets above {format_bytes(capacity)} are planned for a machine like "
            f"{machine.name or 'this one'} with more {tier.value}."
        )
    path = out or Path(f"plan-{tier.value}.png")
    plot(points, tier, path)
    console.print(f"Plot written to {path}")
    return True


def _show_infeasible(
    console: Console, problem: InfeasibleError, request: PlanRequest, as_json: bool
) -> None:
    reason = request.inventory.not_trainable
    if as_json:
        budgets = {tier.value: request.budget.of(tier) for tier in Tier}
        print(json.dumps(infeasible_json(problem, budgets, reason)))
        return
    console.print(f"error: {problem}", style="red", markup=False)
    if reason:
        console.print(f"error: this model cannot be trained: {reason}", style="red", markup=False)


def _parameters() -> list[inspect.Parameter]:
    machine = typer.Option(
        help="Machine file, a preset listed by `penstock machines`, or `this` for this machine "
        "(default: this machine if it has a GPU)."
    )
    config = typer.Option(help="YAML file of settings, as for `penstock train`, or a run.yaml.")
    output = typer.Option(
        "--output", "-o", help="Write the plan to this file; with --vary, the plot."
    )
    vary_ = typer.Option(
        "--vary", help="Plan for a range of budgets of one tier, e.g. dram=16GiB..128GiB."
    )
    explain_ = typer.Option("--explain", help="Show one block of the model in detail.")
    gpus = typer.Option(
        "--gpus", metavar="N[,N...]",
        help="Number of GPUs of a machine. Several numbers, e.g. 2,4,8, give a table with "
        "N times --batch for N GPUs.",
    )  # fmt: skip
    machines = typer.Option(min=1, help="Number of such machines (default: as its file says).")
    return [
        *settings_parameters(SETTINGS, check_choices=False),
        *settings_parameters(IGNORED, check_choices=False, hidden=True),
        keyword("gpus", Annotated[str | None, gpus], None),
        keyword("machines", Annotated[int | None, machines], None),
        keyword("config", Annotated[Path | None, config], None),
        keyword("machine", Annotated[str | None, machine], None),
        keyword("output", Annotated[Path | None, output], None),
        keyword("vary_", Annotated[str | None, vary_], None),
        keyword("explain_", Annotated[str | None, explain_], None),
        keyword("as_json", AsJson, False),
    ]


set_parameters(plan_command, _parameters())
