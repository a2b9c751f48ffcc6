"""Build an engine that is ready to train a model, from the model's name and the settings."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from penstock.engine.plan_choice import (
    PlanChoice,
    PlanRequest,
    budget_paths,
    check_plan,
    check_quantize,
    clear_budget_paths,
    fit_plan,
    is_covered,
    plan_request,
)
from penstock.errors import PlanError, SettingsError, UnsupportedModelError
from penstock.machine.machine import Machine
from penstock.model.inventory import Inventory
from penstock.optimizer_options import check_known, check_values
from penstock.packed_weights import Quantization
from penstock.plan.budget import Budget
from penstock.plan.memory_cache import keep_measured, load_memory, memory_key
from penstock.plan.plan import Plan
from penstock.plan.working_memory import WorkingMemory
from penstock.plan.workload import CallerLoss
from penstock.probe.machine_choice import this_machine
from penstock.records import from_json, to_json
from penstock.roles import Dtype, Moments, OptimizerName
from penstock.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from penstock.checkpoint.adapter_files import AdapterFiles
    from penstock.checkpoint.model_files import ModelFiles
    from penstock.engine.device import Device
    from penstock.engine.engine import Engine, EngineSettings
    from penstock.engine.host_arenas import HostArenas
    from penstock.engine.loss import LossFunction
    from penstock.engine.optimizer import Grouping
    from penstock.engine.rehearsal import Progress
    from penstock.engine.startup import StartUp
    from penstock.engine.tier_memory import StoreSettings
    from penstock.engine.transport import Transport
    from penstock.model.adapters import Adapter
    from penstock.model.live_model import LiveModel
    from penstock.model.split import SplitModel


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

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
"""Files of a model on the Hub that are needed in addition to its weights."""


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

    _check_arguments(model, budget, optimizer)
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
    options = _EngineOptions(
        optimizer=optimizer_options, param_groups=param_groups,
        loss=loss, store=store, device=device, sweep_threads=sweep_threads,
        load_weights=load_weights, rehearse=rehearse, progress=progress, ranks=ranks,
        start_up=start_up,
    )  # fmt: skip
    request = None
    with all_or_none(ranks):
        live = None if isinstance(model, str | Path) else LiveModel(model)
        if live is not None:
            live.check_memory()
        with start_up.phase(startup.SURVEY):
            config, inventory, adapter = _inspect_and_check(
                model, chosen, load_weights=load_weights,
                own_loss=loss is not None or caller_loss is not None,
                runs_head=caller_loss is None,
            )  # fmt: skip
        if caller_loss is None:
            _check_head(live)
            _check_outer_hooks(live, inventory)
            _check_modes(live)
            if loss is None:
                _check_loss_function(live)
        else:
            _check_router_loss(config)
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
            _check_loss(plan, loss, arguments)
    plan = _share_plan(ranks, plan)
    if isinstance(model, str | Path):
        return _build_engine(model, config, inventory, plan, request, chosen, options)
    assert live is not None
    try:
        return _build_engine(live, config, inventory, plan, request, chosen, options)
    except BaseException:
        live.put_back()  # the caller may try again with other budgets
        raise


def _check_arguments(model: object, budget: object, optimizer: object) -> None:
    """Raise an error for arguments of a wrong type, which a user may well pass."""
    if not isinstance(model, str | Path) and not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model, which has a config. Pass a model "
            f"of transformers or PEFT, the path of a model, or its ID on the Hub"
        )
    if budget is not None and not isinstance(budget, Budget | Mapping):
        raise PlanError(
            "budget",
            f"must name tiers, such as {{'hbm': '20GiB', 'dram': 'auto'}}, got {budget!r:.80}",
        )
    if optimizer is not None and not isinstance(optimizer, str | Mapping):
        raise SettingsError(
            "optimizer",
            f"must be a name, or a name with options such as {{'name': 'adamw', 'lr': 1e-5}}: the "
            f"engine has optimizers of its own, for parameters that are not in memory. Got "
            f"{type(optimizer).__name__}",
        )


def _inspect_and_check(
    model: str | Path | nn.Module, settings: Settings, *, load_weights: bool, own_loss: bool,
    runs_head: bool,
) -> tuple[Any, Inventory, Adapter | None]:  # fmt: skip
    """Inspect the model, and raise an error if it cannot be trained or its weights are not there.

    `load_weights` is False for a resumed run, which freezes what it froze before. `own_loss` is set
    if the caller brings a loss in place of the model's.
    """
    from penstock.model.freeze import check_freeze
    from penstock.model.meta_model import check_trainable

    config, inventory = inspect_model(model, settings, runs_head=runs_head)
    adapter = adapter_of(model, settings)
    check_quantize(settings.model.quantize, adapter)
    check_trainable(inventory, own_loss=own_loss)  # first: says more than errors about files
    if load_weights:
        check_freeze(inventory, settings.model.freeze)
    if load_weights and isinstance(model, str | Path) and settings.model.init == "pretrained":
        check_weights(model_directory(model, settings.model.revision), inventory, adapter)
    return config, inventory, adapter


def _check_head(live: LiveModel | None) -> None:
    """Raise UnsupportedModelError if a model has no head for the loss that the engine computes."""
    from penstock.model.output_weight import output_weight

    if live is not None and output_weight(live.model) is None:
        raise UnsupportedModelError(
            f"{type(live.model).__name__} has no head that predicts tokens, and prepare() trains "
            f"with the loss of the next token. Use penstock.stream(model, ...) and compute the "
            f"loss from what the model returns"
        )


def _check_outer_hooks(live: LiveModel | None, inventory: Inventory) -> None:
    """Raise UnsupportedModelError if hooks on the whole model would see other calls than its own.

    The engine calls the module that owns the layers, and the whole model for chunks of tokens.
    """
    from penstock.model.copy_check import HOOKS

    if live is None:
        return
    base = inventory.layers[0].name.split(".")[:-2]
    for depth in range(len(base)):
        name = ".".join(base[:depth])
        module = live.model.get_submodule(name)
        if any(vars(module)[hooks] for hooks in HOOKS):
            raise UnsupportedModelError(
                f"{name or type(live.model).__name__} has hooks, and prepare() does not call it as "
                f"a whole: the engine computes the loss in chunks of tokens. Remove the hooks, put "
                f"them on the modules inside, or use penstock.stream"
            )


def _check_modes(live: LiveModel | None) -> None:
    """Raise UnsupportedModelError if some modules of a model in training mode have no dropout.

    A model that is in evaluation mode, as `from_pretrained` returns it, is trained as a whole.
    """
    from penstock.model.copy_check import has_dropout

    if live is None or not live.model.training:
        return
    for name, module in live.model.named_modules():
        if not module.training and has_dropout(module):
            raise UnsupportedModelError(
                f"{name} has dropout and is in evaluation mode, but the model is in training mode, "
                f"in which the engine computes all modules. Set the rate of its dropout to 0"
            )


def _check_loss_function(live: LiveModel | None) -> None:
    """Raise UnsupportedModelError if the caller has given a model another loss function.

    The model's class is checked with its twin, which does not have what was set on one model.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    if live is None:
        return
    given = vars(live.model).get("_loss_function")
    if given is not None and given is not LOSS_MAPPING["ForCausalLM"]:
        raise UnsupportedModelError(
            f"the loss_function of this {type(live.model).__name__} was set to "
            f"{getattr(given, '__name__', given)}, and prepare() trains with the cross-entropy of "
            f"the next token. Use penstock.stream(model, ...), which trains with any loss, or pass "
            f"prepare(..., loss=...)"
        )


def _share_plan(ranks: Transport, plan: Plan | None) -> Plan:
    """Return the plan of rank 0 on all ranks."""
    from penstock.engine.rank_agreement import share_bytes

    if ranks.world == 1:
        assert plan is not None
        return plan
    text = json.dumps(to_json(plan)) if ranks.rank == 0 else ""
    return from_json(Plan, json.loads(share_bytes(ranks, text.encode())))


def _check_loss(plan: Plan, loss: LossFunction | None, arguments: Mapping[str, Any]) -> None:
    """Raise PlanError unless the plan's numerics compute the loss that the caller asks for."""
    numerics = plan.workload.numerics
    if loss is not None and numerics.loss_kernel == "fused":
        raise PlanError("loss_kernel", "is fused, which supports no custom loss function; plan "
                        "again with the function, or leave the function out")  # fmt: skip
    if loss is not None and numerics.label_smoothing:
        raise PlanError(
            "label_smoothing",
            f"is {numerics.label_smoothing}, which cannot be combined with a custom loss function: "
            f"the function gets the log-probabilities of the targets only; leave one of them out",
        )
    for name in ("label_smoothing", "neftune_noise_alpha", "quantize"):
        planned = getattr(numerics, name)
        wanted = arguments.get(name, planned)
        if (wanted or None) != (planned or None):
            raise PlanError(
                name,
                f"is {planned} in the plan and {wanted} in the arguments; make a new plan, or "
                f"leave the argument out",
            )


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


def inspect_model(
    model: str | Path | nn.Module, settings: Settings, *, name: str | None = None,
    runs_head: bool = True,
) -> tuple[Any, Inventory]:  # fmt: skip
    """Load the model's config, and list its blocks and tensors without loading weights.

    `name` is the model's name in the inventory, if it differs from `model`. `runs_head` is False if
    the caller's own code computes the logits.
    """
    from penstock.checkpoint.manifest import check_small_files
    from penstock.model.adapters import without_wrapper
    from penstock.model.changed_modules import check_changed_modules
    from penstock.model.config import load_config, refuse_multimodal
    from penstock.model.language_model import refuse_live_multimodal
    from penstock.model.quantization import refuse_quantized
    from penstock.model.self_check import check_model
    from penstock.model.survey import survey_config, survey_model

    chosen = settings.model
    if isinstance(model, str | Path):
        if Path(model).is_dir():
            check_small_files(model)
        if chosen.init == "random":
            refuse_multimodal(
                model, trust_remote_code=chosen.trust_remote_code, revision=chosen.revision
            )
        config = load_config(
            model,
            trust_remote_code=chosen.trust_remote_code,
            revision=chosen.revision,
            changes=chosen.model_config,
        )
        return config, survey_config(
            config,
            name=str(model) if name is None else name,
            blocks=chosen.blocks,
            freeze=chosen.freeze,
            trust_remote_code=chosen.trust_remote_code,
            adapter=adapter_of(model, settings),
            check=check_model,
        )
    name, model = name or type(model).__name__, without_wrapper(model)
    refuse_live_multimodal(model)
    config = model.config
    refuse_quantized(model, name)
    inventory = survey_model(
        model, config, name=name, blocks=chosen.blocks, freeze=chosen.freeze, check=check_model
    )
    return config, check_changed_modules(model, inventory, runs_head=runs_head)


def adapter_of(model: str | Path | nn.Module, settings: Settings) -> Adapter | None:
    """Return the adapter that is trained: that of the settings, or the one in a live model."""
    from penstock.model.adapters import find_adapter, lora_adapter, without_wrapper

    options = settings.model.lora_options
    if isinstance(model, str | Path):
        return None if options is None else lora_adapter(options)
    if options is not None:
        raise SettingsError(
            "lora", "is for models that are loaded from files; pass peft.get_peft_model(model, ...)"
        )
    return find_adapter(without_wrapper(model))


def check_weights(folder: Path, inventory: Inventory, adapter: Adapter | None = None) -> None:
    """Raise an error if the weights in a directory are not those of the model.

    With an adapter, these are the weights of the model without it.
    Only the headers of the files are read. Tensors that the model does not have, and buffers that
    the files lack, are no error, but a CheckpointWarning names them.
    """
    import torch

    from penstock.checkpoint.errors import CheckpointWarning
    from penstock.checkpoint.model_weights import ModelWeights

    if adapter is not None:
        from penstock.engine.state_io import base_inventory

        inventory = base_inventory(inventory, adapter)
    with ModelWeights(folder, inventory, torch.bfloat16) as weights:
        if weights.unexpected:
            warnings.warn(
                f"{folder}: {len(weights.unexpected)} tensors do not belong to the model that "
                f"config.json describes ({inventory.architecture}), and are neither trained nor "
                f"part of the saved model: {_shorten(weights.unexpected)}",
                CheckpointWarning, stacklevel=3,
            )  # fmt: skip
        if weights.tensors.packed:
            warnings.warn(
                f"{folder}: the MXFP4 weights of the experts are dequantized to BF16 when they are "
                f"read, and trained and saved unquantized",
                CheckpointWarning, stacklevel=3,
            )  # fmt: skip
        if weights.missing_buffers:
            warnings.warn(
                f"{folder}: the files lack {len(weights.missing_buffers)} buffers of the model "
                f"({_shorten(weights.missing_buffers)}), which keep the values that its class sets",
                CheckpointWarning, stacklevel=3,
            )  # fmt: skip


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def model_directory(model: str | Path, revision: str | None = None) -> Path:
    """Return the directory with the model's files; download a model of the Hub first."""
    if Path(model).is_dir():
        return Path(model)
    # Only safetensors: other weight formats would be downloaded and never read.
    return _download(str(model), revision, ["*.safetensors", *SMALL_FILES])


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the directory with files of a model of the Hub. Raises NoWeightsError."""
    from huggingface_hub import snapshot_download

    from penstock.checkpoint.errors import NoWeightsError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise  # of the disk
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise NoWeightsError(
            model[:200], f"is no directory, and was not downloaded from the Hub: {reason:.300}"
        ) from problem


def small_files_directory(model: str | Path, settings: Settings) -> Path:
    """Return the directory with config and tokenizer. Download them if the model is on the Hub."""
    chosen = settings.model
    if Path(model).is_dir():
        return Path(model)
    if chosen.init == "pretrained":
        return model_directory(model, chosen.revision)
    # Random initial weights: leave the pretrained ones on the Hub.
    return _download(str(model), chosen.revision, SMALL_FILES)


def model_files_of(
    model: str | Path | nn.Module, config: Any, inventory: Inventory, settings: Settings
) -> ModelFiles:
    """Find what has to be saved next to the model's weights."""
    from penstock.checkpoint.model_files import ModelFiles
    from penstock.model.config import load_whole_config, text_config
    from penstock.model.meta_model import weight_dtype

    trust, generation_config = settings.model.trust_remote_code, None
    if isinstance(model, str | Path):
        source: Path | None = small_files_directory(model, settings)
        whole = load_whole_config(source or model, trust_remote_code=trust)
        if text_config(whole) is not whole:
            # Saved with all its tensors, so that transformers loads it as the class that it was.
            whole.text_config, config = config, whole
            if hasattr(whole, "quantization_config"):
                del whole.quantization_config
    else:
        source = _origin_of(model)
        generation_config = getattr(model, "generation_config", None)
    return ModelFiles(
        config=config, dtype=weight_dtype(settings.model.dtype), source=source,
        architecture=inventory.architecture, generation_config=generation_config,
        trust_remote_code=trust,
    )  # fmt: skip


def _origin_of(model: nn.Module) -> Path | None:
    """Return the directory that `from_pretrained` read a live model from, if it is on this disk."""
    name = getattr(model, "name_or_path", "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import snapshot_download

    try:  # from the cache only: the model was loaded, so that its small files are mostly there
        return Path(snapshot_download(name, allow_patterns=SMALL_FILES, local_files_only=True))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineOptions:
    """Arguments of `prepare` that only Python callers can give."""

    optimizer: Mapping[str, Any]
    param_groups: Grouping | None
    loss: LossFunction | None
    store: StoreSettings | None
    device: str | None
    sweep_threads: int | None
    load_weights: bool
    rehearse: bool | None
    progress: Progress | None
    ranks: Transport
    start_up: StartUp


def _build_engine(
    model: str | Path | LiveModel,
    config: Any,
    inventory: Inventory,
    plan: Plan,
    request: PlanRequest | None,
    settings: Settings,
    options: _EngineOptions,
) -> Engine:
    with contextlib.ExitStack() as opened:
        return _open_engine(model, config, inventory, plan, request, settings, options, opened)


def _open_engine(
    model: str | Path | LiveModel,
    config: Any,
    inventory: Inventory,
    plan: Plan,
    request: PlanRequest | None,
    settings: Settings,
    options: _EngineOptions,
    opened: contextlib.ExitStack,
) -> Engine:
    """Build the engine. `opened` ends the threads that help with it."""
    from penstock.engine import startup
    from penstock.engine.device import pick_device
    from penstock.engine.device_memory import (
        check_free_memory,
        explain_out_of_memory,
        use_expandable_segments,
    )
    from penstock.engine.engine import Engine
    from penstock.engine.host_arenas import HostArenas
    from penstock.engine.rank_agreement import all_or_none
    from penstock.engine.self_check import self_check
    from penstock.model.meta_model import weight_dtype
    from penstock.model.saved_names import SavedNames, names_on_save

    use_expandable_segments()
    ranks, start_up = options.ranks, options.start_up
    with all_or_none(ranks), start_up.phase(startup.MODEL):
        origin = model if isinstance(model, str | Path) else model.model
        model_files = model_files_of(origin, config, inventory, settings)
        with start_up.phase(startup.DEVICE):
            device = pick_device(options.device)
        check_free_memory(device, plan)
        dtype = weight_dtype(plan.workload.dtype)
        with explain_out_of_memory(device, plan, "the engine"):
            adapter = adapter_of(origin, settings)
            bare = _bare_model(model, config, inventory, settings, dtype, device)
            quantize = plan.workload.numerics.quantize
            adapter_files = _adapter_files(bare, model, inventory, settings, quantize)
            saved_names = SavedNames() if adapter_files else names_on_save(bare, inventory)
            # Before the layers are taken out of the model, and before anything large is allocated.
            # One rank is enough: all have the same model, software and kind of device.
            if settings.model.self_check and ranks.rank == 0:
                with start_up.phase(startup.SELF_CHECK):
                    self_check(bare, inventory, plan, device, progress=options.progress)
            split_model = _split_model(bare, inventory, plan, device)
            key = memory_key(config, inventory, plan.workload, device.name, adapter)
            # Several ranks allocate together, after they are connected.
            host = opened.enter_context(HostArenas(device)) if ranks.world == 1 else None
            with start_up.phase(startup.REHEARSAL):
                measured = _rehearse(plan, inventory, split_model, device, key, host, options)
    with start_up.phase(startup.PLAN):
        plan, plan_change = _fit_plan(plan, request, inventory, measured, key, options)
    allocated = 0
    if host is not None:
        if plan_change:
            host.release()
        with start_up.phase(startup.HOST):
            allocated = host.wait()
    with all_or_none(ranks):
        check_free_memory(device, plan, allocated)
    with explain_out_of_memory(device, plan, "the engine"):
        try:
            engine_settings = _engine_settings(settings, options)
            engine = Engine(
                plan, inventory, split_model, device, engine_settings, ranks,
                start_up=start_up, host=host,
            )  # fmt: skip
        except BaseException as error:
            ranks.abort(error)  # ranks connect while they allocate: the others wait for this one
            raise
        engine.plan_change = plan_change
        engine.files.adapter, engine.files.saved_names = adapter_files, saved_names
        try:
            with all_or_none(ranks):
                _load_and_pin(engine, host, model, config, settings, options)
                # Loading has found out which weights the adapter belongs to.
                engine.model_files = replace(model_files, adapter=engine.files.adapter)
        except BaseException:
            engine.close()
            raise
    if not isinstance(model, str | Path):
        _take_over(model, engine, dtype)
    return engine


def _load_and_pin(
    engine: Engine, host: HostArenas | None, model: str | Path | LiveModel, config: Any,
    settings: Settings, options: _EngineOptions,
) -> None:  # fmt: skip
    """Give the engine its weights, if it gets them here, and pin host memory meanwhile."""
    from penstock.engine import startup

    # Checkpoints have no frozen weights of a model with an adapter.
    from_files = engine.files.adapter is not None and isinstance(model, str | Path)
    if options.load_weights or from_files:
        if options.progress is not None:
            options.progress(0, 0, "loading weights")
        if host is not None:
            _start_pinning(host, model, settings, options)
        with options.start_up.phase(startup.WEIGHTS), engine.access.setting_initial_values():
            _load_weights(engine, model, config, settings, draw=options.load_weights)
    if host is not None:
        with options.start_up.phase(startup.PIN):
            host.start_pinning()
            host.wait_until_pinned()


def _split_model(bare: nn.Module, inventory: Inventory, plan: Plan, device: Device) -> SplitModel:
    from penstock.model.split import SplitModel

    numerics = plan.workload.numerics
    split_model = SplitModel(
        bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled,
        deterministic=numerics.deterministic, noise_alpha=numerics.neftune_noise_alpha,
        recomputes=True,
    )  # fmt: skip
    split_model.check_noise(device.torch_device)
    return split_model


def _check_router_loss(config: Any) -> None:
    """Raise UnsupportedModelError if a caller's own loss would need the logits of routers."""
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "output_router_logits is on, but with a loss of your own the layers return hidden "
            "states only. Set it to false in the model's config, or let the engine compute the "
            "loss (penstock.prepare), which adds the auxiliary loss"
        )


def _fit_plan(
    plan: Plan, request: PlanRequest | None, inventory: Inventory,
    measured: WorkingMemory | None, key: str, options: _EngineOptions,
) -> tuple[Plan, str]:  # fmt: skip
    """Return a plan for what rank 0 measured, on all ranks, and what changed in it."""
    from penstock.engine.rank_agreement import all_or_none, share_bytes

    ranks, change = options.ranks, ""
    with all_or_none(ranks):
        if measured is not None and ranks.rank == 0:
            if options.loss is None:
                measured = keep_measured(key, measured)
            plan, change = fit_plan(plan, request, inventory, measured)
    change = share_bytes(ranks, change.encode()).decode()
    return (_share_plan(ranks, plan), change) if change else (plan, change)


def _bare_model(
    model: str | Path | LiveModel, config: Any, inventory: Inventory, settings: Settings,
    dtype: torch.dtype, device: Device,
) -> nn.Module:  # fmt: skip
    """Return the model without weights, its buffers on the device."""
    from penstock.model.meta_model import build_model

    own_attention = inventory.own_attention
    if not isinstance(model, str | Path):
        return model.copy_without_weights(device.torch_device, dtype, own_attention=own_attention)
    bare = build_model(
        config, dtype, device.torch_device, own_attention=own_attention,
        trust_remote_code=settings.model.trust_remote_code,
    )  # fmt: skip
    adapter = adapter_of(model, settings)
    return bare if adapter is None else adapter.attach(bare)


def _adapter_files(
    bare: nn.Module, model: str | Path | LiveModel, inventory: Inventory, settings: Settings,
    quantize: Quantization | None,
) -> AdapterFiles | None:  # fmt: skip
    """Find out how the adapter in a model is saved; None if the model has none."""
    from penstock.checkpoint.adapter_files import AdapterFiles, BaseModel
    from penstock.model.adapters import find_adapter

    adapter = find_adapter(bare)  # with the modules that it was put into
    if adapter is None:
        return None
    names = adapter.file_names(bare)
    trained = (t.name for block in inventory.blocks for t in block.tensors if t.trainable)
    for name in trained:
        if name not in names:
            raise UnsupportedModelError(
                f"{name} is trained, but is not part of the adapter, so that PEFT does not save "
                f"it; freeze it, or name its module in modules_to_save"
            )
    chosen = settings.model
    if isinstance(model, str | Path):
        path, revision = str(model), chosen.revision or ""
        path = str(Path(model).resolve()) if Path(model).is_dir() else path
    else:
        path = adapter.config.base_model_name_or_path or getattr(bare, "name_or_path", "") or ""
        revision = adapter.config.revision or ""
    base = BaseModel(path=path, revision=revision, dtype=chosen.dtype, quantize=quantize)
    first: dict[int, str] = {}
    owners = {
        name: first.setdefault(id(tensor), name)
        for name, tensor in bare.named_parameters(remove_duplicate=False)
    }
    tied = {names[n]: owner for n, owner in owners.items() if n in names and n != owner}
    own = {name: saved for name, saved in names.items() if saved not in tied}
    return AdapterFiles(adapter=adapter, names=own, base=base, tied=tied)


def _take_over(live: LiveModel, engine: Engine, dtype: torch.dtype) -> None:
    """Drop the weights that the engine has copied from a live model, until they are restored."""
    from penstock.engine.restore import TRAINING

    # The engine computes in `dtype`. Frozen weights of another type are kept: they come back as
    # they were, not rounded.
    # So are weights that the engine does not have: PEFT keeps the original of a trained copy.
    tensors = {t.name: t for block in engine.inventory.blocks for t in block.tensors}
    # So do weights that the engine has quantized.
    rounded = (
        name
        for name, tensor in tensors.items()
        if not tensor.trainable
        and (live.weights[name].dtype != dtype or tensor.quantization is not None)
    )
    live.forget_weights(keep=[*rounded, *(n for n in live.weights if n not in tensors)])
    live.guard(TRAINING)
    engine.live_model = live


def _rehearse(
    plan: Plan, inventory: Inventory, split_model: SplitModel, device: Device,
    key: str, host: HostArenas | None, options: _EngineOptions,
) -> WorkingMemory | None:  # fmt: skip
    """Measure what a step needs; return None without a rehearsal.

    If an earlier run has measured that the plan fits, `host` starts to allocate meanwhile.

    It runs even if the same was measured before: it compiles the layers, which takes most of its
    time and would otherwise happen in the first step.
    """
    from penstock.engine.host_arenas import arena_specs
    from penstock.engine.rehearsal import rehearse
    from penstock.plan.buffers import planned_room

    on_gpu = device.torch_device.type == "cuda"
    if not (on_gpu if options.rehearse is None else options.rehearse):
        return None
    earlier = load_memory(key, "measured") if options.loss is None else None
    if host is not None and earlier is not None and is_covered(plan, earlier):
        host.start(arena_specs(plan.for_rank(options.ranks.rank)))
    return rehearse(
        split_model,
        plan.workload.stored(inventory),
        plan.workload,
        device,
        limit=plan.allocator_nbytes,
        room=planned_room(plan.pools) if on_gpu else None,
        loss=options.loss,
        progress=options.progress,
    )


def _start_pinning(
    host: HostArenas, model: str | Path | LiveModel, settings: Settings, options: _EngineOptions
) -> None:
    """Pin host memory while weights are read, or before they are copied."""
    from penstock.engine import startup

    host.start_pinning()
    # Weights that the CPU reads from files do not need it. Copies from the device do.
    by_cpu = isinstance(model, str | Path) and settings.model.init == "pretrained"
    if not by_cpu or settings.model.quantize is not None:
        with options.start_up.phase(startup.PIN):
            host.wait_until_pinned()


def _engine_settings(settings: Settings, options: _EngineOptions) -> EngineSettings:
    from penstock.engine.engine import EngineSettings
    from penstock.engine.optimizer import decay_matrices
    from penstock.engine.tier_memory import StoreSettings

    return EngineSettings(
        optimizer=options.optimizer,
        grouping=options.param_groups or decay_matrices,
        loss=options.loss,
        seed=settings.schedule.seed,
        store=options.store or StoreSettings(verify=settings.memory.store_checksums),
        sweep_threads=options.sweep_threads,
        nonfinite=settings.schedule.on_nonfinite,
        self_checked=settings.model.self_check,
    )


def _load_weights(
    engine: Engine, model: str | Path | LiveModel, config: Any, settings: Settings, *, draw: bool
) -> None:
    """Set all weights, or, without `draw`, only the frozen ones of a model with an adapter."""
    from penstock.checkpoint.adapter_files import WeightDigest
    from penstock.engine.initial_weights import draw_adapter, draw_weights, set_weights
    from penstock.engine.rank_agreement import take_weights_of_rank_0

    adapter = engine.files.adapter
    if not isinstance(model, str | Path):
        own = {name: tensor.detach() for name, tensor in model.weights.items()}
        weights = take_weights_of_rank_0(engine.ranks, own)
        digest = WeightDigest()
        set_weights(engine.access, engine.inventory, weights, digest=digest)
        _note_base(engine, digest.value)
    elif adapter is not None:
        dtype, drawn = engine.access.weight_dtype, None
        if draw:
            drawn = draw_adapter(adapter.adapter, config, dtype, settings.schedule.seed)
        if settings.model.init == "random":
            digest = WeightDigest()
            draw_weights(
                engine.access, engine.inventory, engine.split_model, settings.schedule.seed,
                adapter=drawn, digest=digest, trainable=None if draw else False,
            )  # fmt: skip
            _note_base(engine, digest.value)
            return
        folder = model_directory(model, settings.model.revision)
        _note_base(engine, engine.files.read_base(folder, drawn, dtype))
    elif settings.model.init == "random":
        draw_weights(engine.access, engine.inventory, engine.split_model, settings.schedule.seed)
    else:
        engine.files.read_weights(model_directory(model, settings.model.revision))


def _note_base(engine: Engine, digest: str) -> None:
    """Note with which weights an adapter is trained."""
    adapter = engine.files.adapter
    if adapter is not None:
        engine.files.adapter = replace(adapter, base=replace(adapter.base, digest=digest))
