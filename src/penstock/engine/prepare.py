"""From a model's name to an engine that is ready to train it. Room: show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import EngineError, PlanError
from penstock.machine.machine import Machine
from penstock.machine.presets import cpu_machine
from penstock.machine.probe_cache import merge_probe
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget, parse_budget, with_paths
from penstock.plan.plan import Plan
from penstock.plan.workload import Workload, default_numerics
from penstock.planner import PlanResult, make_plan
from penstock.roles import Dtype, Moments

if TYPE_CHECKING:
    from torch import nn

    from penstock.engine.engine import Engine, EngineSettings
    from penstock.engine.loss import LossFunction
    from penstock.engine.optimizer import Grouping
    from penstock.engine.tier_memory import StoreSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that `prepare` can be told. Fields that can change a bit of the result end up in
    the workload; the others in the plan or nowhere."""

    context: int = 4096
    """Tokens in a sequence."""
    batch: int = 8
    """Sequences per optimizer step."""
    micro_batch: int | None = None
    """Sequences computed at once; None: what suits the context."""
    dtype: Dtype = "bf16"
    moments: Moments = "fp32"
    clip: float | None = 1.0
    accumulate: bool = False
    """Let several forward_backward() calls add to one step."""
    steps: int | None = None
    """Of the whole run, where known."""
    freeze: Sequence[str] = ()
    """Patterns of tensors that are not trained."""
    blocks: str | None = None
    """Where the layers are, if that cannot be found."""
    deterministic: bool = False
    compiled: bool | None = None
    """Compiled bodies and kernels of our own; None: on a GPU."""
    own_loss: bool = False
    """The loss is a function of the user's: `prepare` sets it."""
    seed: int = 0
    init: Literal["pretrained", "random", "none"] = "pretrained"
    """`none` leaves them undefined: for whoever reads a checkpoint next."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's config."""
    revision: str | None = None
    trust_remote_code: bool = False
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """lr, betas, eps, weight_decay."""
    device: str | None = None
    """`cpu` or `cuda`; None: the GPU if there is one."""
    sweep_threads: int | None = None
    nonfinite: str = "raise"


def prepare(
    model: str | Path | nn.Module,
    *,
    budget: Budget | Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    machine: Machine | None = None,
    param_groups: Grouping | None = None,
    loss: LossFunction | None = None,
    store: StoreSettings | None = None,
    recipe: Recipe | None = None,
    **more: Any,
) -> Engine:
    """An engine for `model`: a Hugging Face id, a directory, or a live transformers model.

    `budget` is a Budget, or sizes as the command takes them: {"dram": "16GiB", "nvme":
    ["/mnt/nvme:400GiB"]}. Everything else is a field of Recipe: context=, batch=, optimizer=...
    All memory is taken before this returns.
    """
    recipe = replace(recipe or Recipe(), own_loss=loss is not None, **more)
    config = _config(model, recipe)
    inventory = _inventory(model, config, recipe)
    chosen = plan or plan_for(inventory, recipe, budget=budget, machine=machine)
    chosen.check_model(inventory)
    if loss is not None and chosen.workload.numerics.loss_kernel == "fused":
        raise PlanError("loss_kernel", "is fused, which knows no loss function but its own; plan "
                        "again without --plan, or leave the function out")  # fmt: skip
    told = _Told(param_groups, loss, store)
    return _assemble(model, config, inventory, chosen, recipe, told)


def plan_for(
    inventory: Inventory,
    recipe: Recipe,
    *,
    budget: Budget | Mapping[str, Any] | None = None,
    machine: Machine | None = None,
) -> Plan:
    """The plan that `prepare` would make."""
    host = machine or known_machine(recipe.device)[0]
    workload = workload_for(inventory, recipe)
    return planned_for(inventory, workload, budget_for(host, budget), host)[0].plan


def budget_for(machine: Machine, given: Budget | Mapping[str, Any] | None) -> Budget:
    """A budget as the user has it: a Budget, or sizes as the command takes them."""
    if isinstance(given, Budget):
        return given
    sizes = dict(given or {})
    nvme = sizes.pop("nvme", ())
    listed = (nvme,) if isinstance(nvme, str) else tuple(nvme)
    return parse_budget(machine, nvme=listed, **sizes)


def planned_for(
    inventory: Inventory, workload: Workload, budget: Budget, machine: Machine
) -> tuple[PlanResult, Machine]:
    """The best plan, and the machine with every path of the budget."""
    machine, _ = with_paths(machine, budget)
    return make_plan(inventory, workload, budget, machine), machine


def workload_for(inventory: Inventory, recipe: Recipe) -> Workload:
    numerics = default_numerics(
        inventory,
        context=recipe.context,
        batch=recipe.batch,
        micro_batch=recipe.micro_batch,
        kernels=has_kernels(recipe.device) if recipe.compiled is None else recipe.compiled,
        own_loss=recipe.own_loss,
    )
    return Workload(
        context=recipe.context,
        batch=recipe.batch,
        dtype=recipe.dtype,
        moments=recipe.moments,
        clip=recipe.clip,
        accumulate=recipe.accumulate,
        steps=recipe.steps,
        numerics=replace(numerics, deterministic=recipe.deterministic),
    )


def has_kernels(device: str | None = None) -> bool:
    """Whether compiled bodies, Triton's kernels and flash attention in bf16 can run where the model
    computes: on cards from compute capability 8.0 on."""
    import importlib.util

    import torch

    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if not on_gpu or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def known_machine(device: str | None = None) -> tuple[Machine, str]:
    """The machine as it is, with what a probe found out about it, and where that is from; where the
    CPU computes, as a machine without a GPU."""
    import torch

    from penstock.machine.discovery import discover

    found, remark = merge_probe(discover())
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if on_gpu and not found.gpus:
        raise EngineError("device='cuda' was asked for, but there is no GPU that the driver knows")
    return (found if on_gpu else cpu_machine(found)), remark


def _config(model: str | Path | nn.Module, recipe: Recipe) -> Any:
    from penstock.model.config import load_config

    if isinstance(model, str | Path):
        return load_config(
            model,
            trust_remote_code=recipe.trust_remote_code,
            revision=recipe.revision,
            changes=recipe.model_config,
        )
    return model.config


def _inventory(model: str | Path | nn.Module, config: Any, recipe: Recipe) -> Inventory:
    from penstock.model.survey import survey_config, survey_model

    told: dict[str, Any] = {"blocks": recipe.blocks, "freeze": recipe.freeze}
    if isinstance(model, str | Path):
        trust = recipe.trust_remote_code
        return survey_config(config, name=str(model), trust_remote_code=trust, **told)
    return survey_model(model, config, name=type(model).__name__, **told)


@dataclass(frozen=True, slots=True)
class _Told:
    """What the caller hands in as objects."""

    param_groups: Grouping | None
    loss: LossFunction | None
    store: StoreSettings | None


def _assemble(
    model: str | Path | nn.Module,
    config: Any,
    inventory: Inventory,
    plan: Plan,
    recipe: Recipe,
    told: _Told,
) -> Engine:
    from penstock.engine.device import pick_device
    from penstock.engine.engine import Engine
    from penstock.model.skeleton import build_model, check_trainable, strip_model, weight_dtype
    from penstock.model.split import SplitModel

    check_trainable(inventory)
    set_determinism(recipe.deterministic)
    device, source = pick_device(recipe.device), None
    if isinstance(model, str | Path):
        trust = recipe.trust_remote_code
        dtype = weight_dtype(plan.workload.dtype)
        bare = build_model(config, dtype, device.where, trust_remote_code=trust)
    else:
        source = dict(model.state_dict())
        bare = strip_model(model, device.where, weight_dtype(plan.workload.dtype))
    numerics = plan.workload.numerics
    body = SplitModel(bare, inventory, mlp_tile=numerics.mlp_tile, compiled=numerics.compiled)
    engine = Engine(plan, inventory, body, device, _engine_settings(recipe, told))
    try:
        _first_weights(engine, model, source, recipe)
    except BaseException:
        engine.close()
        raise
    return engine


def _engine_settings(recipe: Recipe, told: _Told) -> EngineSettings:
    from penstock.engine.engine import EngineSettings
    from penstock.engine.optimizer import decay_matrices
    from penstock.engine.tier_memory import StoreSettings

    return EngineSettings(
        optimizer=recipe.optimizer,
        grouping=told.param_groups or decay_matrices,
        loss=told.loss,
        seed=recipe.seed,
        store=told.store or StoreSettings(),
        sweep_threads=recipe.sweep_threads,
        nonfinite=recipe.nonfinite,
    )


def _first_weights(engine: Engine, model: Any, source: Any, recipe: Recipe) -> None:
    from penstock.engine.initial_weights import draw_weights, take_weights

    if recipe.init == "none":
        return
    if source is not None:
        take_weights(engine.access, engine.inventory, source)
    elif recipe.init == "random":
        draw_weights(engine.access, engine.inventory, engine.body, recipe.seed)
    else:
        engine.files.read_weights(model_directory(model, recipe.revision))


def model_directory(model: str | Path, revision: str | None = None) -> Path:
    """Where its files are; a model of the hub is downloaded, safetensors only."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    return Path(snapshot_download(str(model), revision=revision, allow_patterns=wanted))


def set_determinism(wanted: bool) -> None:
    """Rule out kernels that may differ from run to run."""
    import os

    import torch

    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
