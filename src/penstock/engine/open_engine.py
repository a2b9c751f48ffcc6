"""Build an engine for a plan: look at the model once more, measure, allocate and load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.model_source import adapter_of, model_directory, model_files_of
from penstock.engine.plan_choice import PlanRequest, fit_plan, is_covered
from penstock.errors import UnsupportedModelError
from penstock.model.inventory import Inventory
from penstock.packed_weights import Quantization
from penstock.plan.memory_cache import keep_measured, load_memory, memory_key
from penstock.plan.plan import Plan
from penstock.plan.working_memory import WorkingMemory
from penstock.records import from_json, to_json
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
    from penstock.model.live_model import LiveModel
    from penstock.model.saved_names import SavedNames
    from penstock.model.split import SplitModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
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


class _Examined(NamedTuple):
    """The results of examining a model, before memory is allocated."""

    device: Device
    split_model: SplitModel
    """The model without weights, in blocks."""
    dtype: torch.dtype
    model_files: ModelFiles
    adapter_files: AdapterFiles | None
    saved_names: SavedNames
    key: str
    """The key of measured working memory in the user's cache."""
    measured: WorkingMemory | None
    """The working memory that a rehearsal has measured; None without a rehearsal."""


def open_engine(
    model: str | Path | LiveModel,
    config: Any,
    inventory: Inventory,
    plan: Plan,
    request: PlanRequest | None,
    settings: Settings,
    options: EngineOptions,
) -> Engine:
    """Build the engine, allocate all its memory, and give it its weights."""
    from penstock.engine import startup
    from penstock.engine.device_memory import explain_out_of_memory, use_expandable_segments
    from penstock.engine.rank_agreement import all_or_none

    use_expandable_segments()
    ranks, start_up = options.ranks, options.start_up
    with contextlib.ExitStack() as opened:  # ends the threads that help with it
        with all_or_none(ranks), start_up.phase(startup.MODEL):
            found, host = _examine(model, config, inventory, plan, settings, options, opened)
        with start_up.phase(startup.PLAN):
            plan, change = _fit_plan(plan, request, inventory, found.measured, found.key, options)
        if host is not None and change:
            host.release()
        engine = _allocate(plan, inventory, found, host, settings, options)
        engine.plan_change = change
        engine.files.adapter, engine.files.saved_names = found.adapter_files, found.saved_names
        try:
            with explain_out_of_memory(found.device, plan, "the engine"), all_or_none(ranks):
                _load_and_pin(engine, host, model, config, settings, options)
                # Loading has found out which weights the adapter belongs to.
                engine.model_files = replace(found.model_files, adapter=engine.files.adapter)
        except BaseException:
            engine.close()
            raise
    if not isinstance(model, str | Path):
        _take_over(model, engine, found.dtype)
    return engine


def _examine(
    model: str | Path | LiveModel, config: Any, inventory: Inventory, plan: Plan,
    settings: Settings, options: EngineOptions, opened: contextlib.ExitStack,
) -> tuple[_Examined, HostArenas | None]:  # fmt: skip
    """Check and measure the model without its weights.

    Also returns the host memory that is being allocated meanwhile; `opened` waits for its threads.
    """
    from penstock.engine import startup
    from penstock.engine.device import pick_device
    from penstock.engine.device_memory import check_free_memory, explain_out_of_memory
    from penstock.engine.host_arenas import HostArenas
    from penstock.engine.self_check import self_check
    from penstock.model.meta_model import weight_dtype
    from penstock.model.saved_names import SavedNames, names_on_save

    ranks, start_up = options.ranks, options.start_up
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
        # Before the layers are taken out of the model, and before anything large is allocated. One
        # rank is enough: all have the same model, software and kind of device.
        if settings.model.self_check and ranks.rank == 0:
            with start_up.phase(startup.SELF_CHECK):
                self_check(bare, inventory, plan, device, progress=options.progress)
        split_model = _split_model(bare, inventory, plan, device)
        key = memory_key(config, inventory, plan.workload, device.name, adapter)
        # Several ranks allocate together, after they are connected.
        host = opened.enter_context(HostArenas(device)) if ranks.world == 1 else None
        with start_up.phase(startup.REHEARSAL):
            measured = _rehearse(plan, inventory, split_model, device, key, host, options)
    found = _Examined(
        device, split_model, dtype, model_files, adapter_files, saved_names, key, measured
    )
    return found, host


def _allocate(
    plan: Plan, inventory: Inventory, found: _Examined, host: HostArenas | None,
    settings: Settings, options: EngineOptions,
) -> Engine:  # fmt: skip
    """Return an engine with all its memory, and without weights."""
    from penstock.engine import startup
    from penstock.engine.device_memory import check_free_memory, explain_out_of_memory
    from penstock.engine.engine import Engine
    from penstock.engine.rank_agreement import all_or_none

    allocated, ranks = 0, options.ranks
    if host is not None:
        with options.start_up.phase(startup.HOST):
            allocated = host.wait()
    with all_or_none(ranks):
        check_free_memory(found.device, plan, allocated)
    with explain_out_of_memory(found.device, plan, "the engine"):
        try:
            return Engine(
                plan, inventory, found.split_model, found.device,
                _engine_settings(settings, options), ranks,
                start_up=options.start_up, host=host,
            )  # fmt: skip
        except BaseException as error:
            ranks.abort(error)  # ranks connect while they allocate: the others wait for this one
            raise


def share_plan(ranks: Transport, plan: Plan | None) -> Plan:
    """Return the plan of rank 0 on all ranks."""
    from penstock.engine.rank_agreement import share_bytes

    if ranks.world == 1:
        assert plan is not None
        return plan
    text = json.dumps(to_json(plan)) if ranks.rank == 0 else ""
    return from_json(Plan, json.loads(share_bytes(ranks, text.encode())))


def _fit_plan(
    plan: Plan, request: PlanRequest | None, inventory: Inventory,
    measured: WorkingMemory | None, key: str, options: EngineOptions,
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
    return (share_plan(ranks, plan), change) if change else (plan, change)


def _rehearse(
    plan: Plan, inventory: Inventory, split_model: SplitModel, device: Device,
    key: str, host: HostArenas | None, options: EngineOptions,
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


def _engine_settings(settings: Settings, options: EngineOptions) -> EngineSettings:
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


def _load_and_pin(
    engine: Engine, host: HostArenas | None, model: str | Path | LiveModel, config: Any,
    settings: Settings, options: EngineOptions,
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


def _start_pinning(
    host: HostArenas, model: str | Path | LiveModel, settings: Settings, options: EngineOptions
) -> None:
    """Pin host memory while weights are read, or before they are copied."""
    from penstock.engine import startup

    host.start_pinning()
    # Weights that the CPU reads from files do not need it. Copies from the device do.
    by_cpu = isinstance(model, str | Path) and settings.model.init == "pretrained"
    if not by_cpu or settings.model.quantize is not None:
        with options.start_up.phase(startup.PIN):
            host.wait_until_pinned()


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


def _take_over(live: LiveModel, engine: Engine, dtype: torch.dtype) -> None:
    """Drop the weights that the engine has copied from a live model, until they are restored."""
    from penstock.engine.restore import TRAINING

    # Two kinds of weights are kept, so that they come back as they were: frozen ones that the
    # engine has rounded to `dtype` or quantized, and those that it does not have, such as the
    # original of a module of which PEFT trains a copy.
    tensors = {t.name: t for block in engine.inventory.blocks for t in block.tensors}
    rounded = (
        name
        for name, tensor in tensors.items()
        if not tensor.trainable
        and (live.weights[name].dtype != dtype or tensor.quantization is not None)
    )
    live.forget_weights(keep=[*rounded, *(n for n in live.weights if n not in tensors)])
    live.guard(TRAINING)
    engine.live_model = live
