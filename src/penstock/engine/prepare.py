"""Build an engine that is ready to train a model, from the model's name and the settings."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from penstock.engine.model_source import (
    adapter_of,
    check_weights,
    inspect_model,
    model_directory,
)
from penstock.engine.open_engine import EngineOptions, open_engine, share_plan
from penstock.engine.plan_choice import (
    PlanChoice,
    budget_paths,
    check_plan,
    check_quantize,
    clear_budget_paths,
    plan_request,
)
from penstock.engine.prepare_checks import (
    check_arguments,
    check_live_model,
    check_loss,
    check_router_loss,
)
from penstock.errors import PlanError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.optimizer_options import check_known, check_values
from penstock.packed_weights import Quantization
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan
from penstock.plan.workload import CallerLoss
from penstock.probe.machine_choice import this_machine
from penstock.roles import Dtype, Moments, OptimizerName
from penstock.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from penstock.engine.engine import Engine
    from penstock.engine.loss import LossFunction
    from penstock.engine.optimizer import Grouping
    from penstock.engine.rehearsal import Progress
    from penstock.engine.startup import StartUp
    from penstock.engine.tier_memory import StoreSettings
    from penstock.engine.transport import Transport
    from penstock.model.adapters import Adapter
    from penstock.model.live_model import LiveModel


class PrepareSettings(TypedDict, total=False):
    """Settings that `prepare` takes by name. `penstock.Settings` has their defaults."""

    context: int
    """Sequence length in tokens."""
    batch: int
    """Number of sequences per optimizer step."""
    micro_batch: int | Literal["auto"] | None
    """Number of sequences computed together; None or `auto` to choose it from the context."""
    dtype: Dtype
    """Type that weights and activations are computed in."""
    moments: Moments
    """Storage format of the optimizer's moments."""
    clip: float | None
    """Maximum gradient norm; None or 0 for no clipping."""
    steps: int | None
    """Number of steps of the run, which makes the estimate of drive wear complete."""
    lora: str | Sequence[str]
    """Options of a LoRA adapter that is trained instead of the weights, such as
    `r=16,alpha=32,targets=all-linear`."""
    quantize: Quantization | None
    """With an adapter: `nf4` or `int4` to store the frozen weights of linear layers as 4-bit
    numbers."""
    freeze: str | Sequence[str]
    """Patterns of names of tensors that are not trained."""
    blocks: str | None
    """Module that holds the transformer layers, if it is not found automatically."""
    deterministic: bool
    """Whether to use only kernels that give the same bits in every run."""
    seed: int
    """Seed of dropout, stochastic rounding and random weights."""
    label_smoothing: float
    """Share of each target's probability that is spread over the whole vocabulary."""
    neftune_noise_alpha: float | None
    """Strength of NEFTune's noise on embeddings during training; None or 0 for none."""
    init: Literal["pretrained", "random", "none"]
    """Where the weights come from; `none` leaves them uninitialized, for callers that read a
    checkpoint next."""
    model_config: Mapping[str, Any]
    """Values of the model's config to override."""
    revision: str | None
    """Revision of a model on the Hub."""
    trust_remote_code: bool
    """Whether to run code from the model repository."""
    lr: float
    """Learning rate."""
    betas: tuple[float, float]
    """Betas of AdamW, Lion and Muon."""
    momentum: float | None
    """Momentum of SGD and Muon."""
    nesterov: bool | None
    """Whether SGD and Muon use Nesterov momentum."""
    weight_decay: float
    """Weight decay."""
    store_checksums: bool
    """Whether to keep checksums of what is written to NVMe, and to check them on every read."""
    self_check: bool
    """Whether to compare the training of a tiny copy of the model with plain transformers first."""


ARGUMENTS = tuple(PrepareSettings.__annotations__)
"""Names of the settings that `prepare` takes as keyword arguments."""


def prepare(
    model: str | Path | nn.Module,
    *,
    budget: Budget | Mapping[str, Any] | None = None,
    plan: Plan | PlanChoice | None = None,
    machine: Machine | None = None,
    optimizer: OptimizerName | Mapping[str, Any] | None = None,
    param_groups: Grouping | None = None,
    loss: LossFunction | None = None,
    accumulate: bool = False,
    nonfinite: str | None = None,
    compiled: bool | None = None,
    device: str | None = None,
    sweep_threads: int | None = None,
    store: StoreSettings | None = None,
    rehearse: bool | None = None,
    progress: Progress | None = None,
    ranks: Transport | None = None,
    settings: Settings | None = None,
    caller_loss: CallerLoss | None = None,
    start_up: StartUp | None = None,
    **arguments: Unpack[PrepareSettings],
) -> Engine:
    """Build an engine for `model`, and allocate all its memory.

    Args:
        model: Hugging Face model ID, model directory, or a live transformers model.
        budget: Memory budgets, as a `Budget` or in the form the command line takes:
            `{"dram": "16GiB", "nvme": ["/mnt/nvme:400GiB"]}`. Tiers that are left out are `auto`.
        plan: Plan to follow. By default, the best plan for the budgets. A `PlanChoice` that was
            made for budgets is made again if the rehearsal shows that it is too small; a `Plan` is
            never changed.
        machine: Machine to plan for. By default, this one.
        optimizer: Name of the optimizer, or its options, such as
            `{"name": "sgd", "lr": 0.1, "momentum": 0.9}`. The options are those of torch's
            optimizers (`penstock.optimizer_options`). By default, AdamW.
        param_groups: Function from named parameters to parameter groups. By default, matrices are
            decayed, and norms and biases are not.
        loss: Loss function. By default, next-token cross-entropy.
        accumulate: Allow several `forward_backward()` calls per optimizer step.
        nonfinite: `raise` or `skip`, for steps whose loss or gradient is NaN or infinite.
        compiled: Compile layers and use Penstock's own kernels. By default, if the GPU runs them.
        device: `cpu` or `cuda`. By default, the GPU if there is one.
        sweep_threads: Number of CPU threads of the optimizer sweep.
        store: Options of the store on NVMe; they replace `store_checksums`.
        rehearse: Run every kind of layer once before memory is allocated, to measure what a step
            needs and to compile. By default, on a GPU.
        progress: Called with work done, the total and a description while the engine is prepared.
        ranks: Connection to the other ranks, if this process is one of several. All ranks must call
            this with the same arguments, except for the device. The plan is that of rank 0.
        settings: Settings to start from. By default, every setting has its default.
        caller_loss: For `penstock.stream`, which computes the loss outside of the engine.
        start_up: Record to add the phases of this call to. By default, a new one, which is
            `Engine.start_up`.
        **arguments: Settings by name, as `PrepareSettings` describes them: context, batch,
            micro_batch, dtype, moments, clip, steps, lora, quantize, freeze, blocks, deterministic,
            seed, label_smoothing, neftune_noise_alpha, init, model_config, revision,
            trust_remote_code, lr, betas, momentum, nesterov, weight_decay, store_checksums and
            self_check.

    Returns:
        The engine. Use it as a context manager, or call `close`.
    """
    from penstock.engine import startup

    check_arguments(model, budget, optimizer)
    start_up = startup.StartUp() if start_up is None else start_up
    with start_up.phase(startup.IMPORT):
        import transformers.modeling_utils  # noqa: F401  which takes seconds

        import penstock.engine.engine  # noqa: F401
        from penstock.engine.rank_agreement import all_or_none
        from penstock.engine.transport import SingleRank, check_ranks
        from penstock.model.live_model import LiveModel

    if plan is not None and budget is not None:
        raise PlanError(
            "budget",
            "cannot be combined with a plan, which contains the budgets it was made for; leave one "
            "of them out",
        )
    chosen, load_weights = _settings_with(settings or Settings(), arguments, nonfinite)
    chosen, optimizer_options = _optimizer_with(chosen, optimizer, plan)
    ranks = SingleRank() if ranks is None else ranks
    chosen = chosen.replace({"gpus": ranks.world})
    options = EngineOptions(
        optimizer=optimizer_options, param_groups=param_groups,
        loss=loss, store=store, device=device, sweep_threads=sweep_threads,
        load_weights=load_weights, rehearse=rehearse, progress=progress, ranks=ranks,
        start_up=start_up,
    )  # fmt: skip
    request = None
    with all_or_none(ranks):
        live = None if isinstance(model, str | Path) else LiveModel(model)
        with start_up.phase(startup.SURVEY):
            config, inventory, adapter = _inspect_and_check(
                model, live, chosen, options, computes_loss=caller_loss is None
            )
        # One rank plans for all: free memory differs between them.
        if plan is None and ranks.rank == 0:
            with start_up.phase(startup.PLAN):
                plan = choose_plan(
                    inventory, chosen, config=config, budget=budget, machine=machine,
                    accumulate=accumulate, compiled=compiled, own_loss=loss is not None,
                    device=device, adapter=adapter, caller_loss=caller_loss,
                )  # fmt: skip
        # A plan that was made for budgets may be made again; one that the caller brings may not.
        if isinstance(plan, PlanChoice):
            request, plan = plan.request, plan.plan
        if plan is not None:
            check_ranks(plan.workload, ranks)
            plan.check_model(inventory)
            check_quantize(plan.workload.numerics.quantize, adapter)
            check_loss(plan, loss, arguments)
    plan = share_plan(ranks, plan)
    if isinstance(model, str | Path):
        return open_engine(model, config, inventory, plan, request, chosen, options)
    assert live is not None
    try:
        return open_engine(live, config, inventory, plan, request, chosen, options)
    except BaseException:
        live.put_back()  # the caller may try again with other budgets
        raise


def _inspect_and_check(
    model: str | Path | nn.Module, live: LiveModel | None, settings: Settings,
    options: EngineOptions, *, computes_loss: bool,
) -> tuple[Any, Inventory, Adapter | None]:  # fmt: skip
    """Inspect the model, and raise an error if it cannot be trained or its weights are not there.

    A resumed run, which loads no weights here, freezes what it froze before. `computes_loss` says
    whether the engine computes the loss, and not the caller.
    """
    from penstock.model.freeze import check_freeze
    from penstock.model.meta_model import check_trainable

    if live is not None:
        live.check_memory()
    own_loss = options.loss is not None or not computes_loss
    config, inventory = inspect_model(model, settings, runs_head=computes_loss)
    adapter = adapter_of(model, settings)
    check_quantize(settings.model.quantize, adapter)
    check_trainable(inventory, own_loss=own_loss)  # first: says more than errors about files
    if options.load_weights:
        check_freeze(inventory, settings.model.freeze)
        if isinstance(model, str | Path) and settings.model.init == "pretrained":
            check_weights(model_directory(model, settings.model.revision), inventory, adapter)
    if not computes_loss:
        check_router_loss(config)
    elif live is not None:
        check_live_model(live, inventory, own_loss=own_loss)
    return config, inventory, adapter


def _settings_with(
    settings: Settings, arguments: Mapping[str, Any], nonfinite: str | None
) -> tuple[Settings, bool]:
    """Return the settings with the arguments of `prepare`, and whether to load weights."""
    unknown = [name for name in arguments if name not in ARGUMENTS]
    if unknown:
        own = (
            n for n, p in inspect.signature(prepare).parameters.items() if p.kind == p.KEYWORD_ONLY
        )
        close = difflib.get_close_matches(unknown[0], [*ARGUMENTS, *own], 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(ARGUMENTS)}"
        raise TypeError(f"prepare() got an unexpected keyword argument {unknown[0]!r}{hint}")
    load_weights = arguments.get("init") != "none"
    given = {name: value for name, value in arguments.items() if load_weights or name != "init"}
    if nonfinite is not None:
        given["on_nonfinite"] = nonfinite
    return settings.replace(given), load_weights


def _optimizer_with(
    settings: Settings,
    optimizer: OptimizerName | Mapping[str, Any] | None,
    plan: Plan | PlanChoice | None,
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings with the optimizer of `prepare`'s argument, and all its options."""
    options = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer or {})
    name = options.pop("name", None)
    if plan is not None:
        made = plan.plan if isinstance(plan, PlanChoice) else plan
        planned = made.workload.optimizer
        if name not in (None, planned):
            raise PlanError(
                "workload.optimizer",
                f"is {planned}, but the optimizer is to be {name}; make a plan for it, or leave "
                f"the optimizer out",
            )
        name = planned
    if name is not None:
        settings = settings.replace({"optimizer": name})
    check_known(settings.schedule.optimizer, options)
    # These decide how much memory is planned; the others are options of parameter groups alone.
    planned_by = {n: options[n] for n in ("momentum", "nesterov") if n in options}
    settings = settings.replace(planned_by)
    options = settings.schedule.optimizer_options | options
    check_values(settings.schedule.optimizer, options)
    return settings, options


def choose_plan(
    inventory: Inventory,
    settings: Settings,
    *,
    config: Any = None,
    budget: Budget | Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    accumulate: bool = False,
    compiled: bool | None = None,
    own_loss: bool = False,
    device: str | None = None,
    adapter: Adapter | None = None,
    caller_loss: CallerLoss | None = None,
) -> PlanChoice:
    """Make the plan that `prepare` makes, or load the one that the settings name."""
    path = settings.memory.plan if budget is None else None
    plan = None if path is None else Plan.load(path)
    limits = settings.memory.budgets if budget is None else budget
    used = limits if plan is None else plan.budget
    clear_budget_paths(used)
    target = this_machine(device, budget_paths(used))
    if machine is not None:
        target = replace(target, machine=machine)
    if plan is not None and path is not None:
        return check_plan(plan, inventory, target, path=path)
    request = plan_request(
        inventory, settings, target, config=config,
        budget=limits, accumulate=accumulate, compiled=compiled, own_loss=own_loss,
        adapter=adapter,
        caller_loss=caller_loss,
    )  # fmt: skip
    return request.make_plan()
