"""Make the engine of a trainer from the trainer's arguments."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from penstock.checkpoint.manifest import Checkpoint
from penstock.distributed.rank_group import RankGroup, single_rank
from penstock.engine.engine import Engine
from penstock.engine.loss import LossFunction
from penstock.engine.model_source import adapter_of, inspect_model
from penstock.engine.plan_choice import (
    PlanChoice,
    budget_paths,
    clear_budget_paths,
    plan_request,
)
from penstock.engine.prepare import prepare
from penstock.engine.rank_agreement import all_or_none
from penstock.errors import RecordError, SettingsError, WorkloadError
from penstock.integrations.config import PenstockConfig
from penstock.model.adapters import without_wrapper
from penstock.model.inventory import Inventory
from penstock.probe.machine_choice import this_machine
from penstock.roles import Dtype
from penstock.settings import Settings
from penstock.train.progress import print_plan
from penstock.train.resume import ResumePoint, load_resume_point, resumed_numerics

_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

_ENGINE_OPTIONS = ("compiled", "sweep_threads", "store", "rehearse", "progress")
"""Arguments of `prepare` that a trainer does not set itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What a trainer asks an engine for."""

    model: nn.Module
    """A transformers model, or a PEFT model around one."""
    args: Any
    """The trainer's arguments."""
    config: PenstockConfig
    rows: int
    """Sequences per optimizer step, on all ranks together."""
    length: Callable[[int | None], tuple[int, str]]
    """Returns the longest sequence, and where it comes from, given the model's limit."""
    steps: int | None
    """Optimizer steps of the run, if known."""
    optimizer: dict[str, Any]
    """Name and options of the optimizer."""
    decayed: frozenset[str]
    """Names of the transformers model's parameters with weight decay."""
    loss: LossFunction | None = None
    resume: Checkpoint | None = None
    """Checkpoint whose numerics the run keeps."""
    group: RankGroup = field(default_factory=single_rank)
    """This process among the ranks of the trainer."""


def open_engine(request: EngineRequest, *, show: bool) -> Engine:
    """Plan memory for a trainer, and build the engine. All ranks call this, and rank 0 plans."""
    options = _engine_options(request.config)
    settings, ranks = _settings(request), request.group.transport
    choice = None
    with all_or_none(ranks):
        config, inventory = inspect_model(request.model, settings)
        length, source = request.length(inventory.max_context)
        settings = settings.replace({"context": length})
        resume = None if request.resume is None else load_resume_point(request.resume)
        if resume is not None:
            resume.check_formats(settings)
        if request.group.talks:
            choice = _choose_plan(request, settings, config, inventory, resume)
    if show and choice is not None and request.config.show_plan:
        console = Console(file=sys.stdout, width=120, highlight=False)
        console.print(f"Penstock plans for sequences of {length} tokens ({source}).")
        print_plan(console, choice)
    return prepare(
        request.model, plan=choice, settings=settings, optimizer=request.optimizer,
        param_groups=_grouping(request), loss=request.loss, ranks=ranks,
        device=request.group.device or _device(request.args), **options,
    )  # fmt: skip


def _engine_options(config: PenstockConfig) -> dict[str, Any]:
    """Return the arguments that the user adds to those that a trainer gives to `prepare`."""
    options = dict(config.engine or {})
    options.pop("machine", None)  # which the plan is made for
    for name in options:
        if name not in _ENGINE_OPTIONS:
            raise SettingsError(
                "engine",
                f"has {name!r:.80}, which it cannot set; it takes machine, "
                f"{', '.join(_ENGINE_OPTIONS)}",
            )
    return options


def _choose_plan(
    request: EngineRequest,
    settings: Settings,
    config: Any,
    inventory: Inventory,
    resume: ResumePoint | None,
) -> PlanChoice:
    """Make the best plan for the budgets; a resumed run keeps the numerics of its checkpoint."""
    budget = request.config.budget
    clear_budget_paths(budget)
    target = this_machine(_device(request.args), budget_paths(budget))
    machine = (request.config.engine or {}).get("machine")
    if machine is not None:
        target = replace(target, machine=machine)
    try:
        made = plan_request(
            inventory, settings, target,
            config=config, budget=budget, steps=request.steps, own_loss=request.loss is not None,
            adapter=adapter_of(request.model, settings), machines=request.group.place.machines,
        )  # fmt: skip
    except WorkloadError as wrong:
        raise _explain_few_micro_batches(request, wrong) from None
    numerics = resumed_numerics(made.workload.numerics, resume, settings)
    return replace(made, workload=replace(made.workload, numerics=numerics)).make_plan()


def _explain_few_micro_batches(request: EngineRequest, wrong: WorkloadError) -> RecordError:
    """Name a trainer's arguments where an error names the flags of `penstock train`."""
    world = request.group.world
    if wrong.field != "batch" or world == 1:
        return wrong
    smaller = request.rows // world
    return SettingsError(
        "micro_batch",
        f"leaves a process without work: an optimizer step has {request.rows} sequences "
        f"(per_device_train_batch_size x gradient_accumulation_steps x {world} processes), which "
        f"are fewer than {world} micro-batches, and each process computes at least one. "
        + (
            f"Pass PenstockConfig(micro_batch={smaller}), or "
            if smaller
            else "Increase the batch: "
        )
        + "raise per_device_train_batch_size or gradient_accumulation_steps",
    )


def _settings(request: EngineRequest) -> Settings:
    args, config = request.args, request.config
    return Settings.of(
        {
            "batch": request.rows,
            "gpus": request.group.place.local_world,
            "micro_batch": str(config.micro_batch),
            "dtype": config.dtype or compute_dtype(args, request.model),
            "optimizer": request.optimizer["name"],
            "momentum": request.optimizer.get("momentum"),
            "nesterov": request.optimizer.get("nesterov"),
            "moments": config.moments,
            "clip": max(0.0, float(args.max_grad_norm or 0.0)),
            "freeze": (config.freeze,) if isinstance(config.freeze, str) else tuple(config.freeze),
            "quantize": config.quantize,
            "deterministic": config.deterministic,
            "seed": args.seed,
            "label_smoothing": args.label_smoothing_factor,
            "neftune_noise_alpha": args.neftune_noise_alpha or 0.0,
            "on_nonfinite": config.on_nonfinite,
            "self_check": config.self_check,
        }
    )


def compute_dtype(args: Any, model: nn.Module) -> Dtype:
    """Return the type that the arguments ask for, or else that of most of the model's weights.

    Adapters of PEFT have other types than the weights that they are added to.
    """
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        elements[parameter.dtype] += parameter.numel()
    dtype = elements.most_common(1)[0][0]
    if dtype not in _DTYPES:
        raise SettingsError("dtype", f"cannot be {dtype}, as the weights are; set bf16 or fp16")
    return _DTYPES[dtype]


def _device(args: Any) -> str:
    kind = str(args.device.type)
    if kind not in ("cpu", "cuda"):
        raise SettingsError("device", f"is {kind}; Penstock computes on cuda or cpu: set use_cpu")
    return kind


def _grouping(request: EngineRequest) -> Callable[..., list[dict[str, Any]]]:
    """Return the function that groups parameters as Trainer does, in the order of the model."""
    named_parameters = without_wrapper(request.model).named_parameters()
    order = {name: number for number, (name, _) in enumerate(named_parameters)}
    decay = request.optimizer.get("weight_decay", request.args.weight_decay)

    def group(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        listed = sorted(named, key=lambda each: order[each[0]])
        return [
            {
                "params": [p for name, p in listed if (name in request.decayed) == decayed],
                "weight_decay": decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]

    return group
