"""`penstock.stream`: a model to train with any loss, in a loop or trainer of the caller's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.prepare import prepare
from penstock.errors import SettingsError
from penstock.machine.machine import Machine
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan
from penstock.plan.workload import CallerLoss
from penstock.rank_place import RankPlace
from penstock.roles import WEIGHT_FORMATS, Dtype, OptimizerName
from penstock.units import parse_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from penstock.autograd.optimizer import StreamedModelOptimizer
    from penstock.autograd.towers import Towers
    from penstock.engine.optimizer import Grouping
    from penstock.engine.rehearsal import Progress
    from penstock.engine.tier_memory import StoreSettings


def stream(
    model: str | Path | nn.Module,
    *,
    tokens: int,
    context: int | None = None,
    budget: Budget | Mapping[str, Any] | None = None,
    live_forwards: int = 1,
    loss_memory: int | str | None = None,
    plan: Plan | None = None,
    machine: Machine | None = None,
    optimizer: OptimizerName | Mapping[str, Any] | None = None,
    param_groups: Grouping | None = None,
    compiled: bool | None = None,
    device: str | None = None,
    sweep_threads: int | None = None,
    store: StoreSettings | None = None,
    rehearse: bool | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> tuple[Any, StreamedModelOptimizer]:
    """Return a model whose forward pass streams and is differentiable, and its optimizer.

    Compute any loss from what the model returns, then call `loss.backward()`, `optimizer.step()`
    and `optimizer.zero_grad()`. TRL's trainers and `Trainer` take the model as it is, and the
    optimizer as `optimizers=(optimizer, None)`.

    Args:
        model: Hugging Face model ID, model directory, or a live transformers model. A live model
            becomes the streamed one, and gets its trained weights back in `close`.
        tokens: Maximum number of tokens of one call: rows times their length, padding included.
        context: Maximum length of a row. By default, as many as `tokens` and the model allow.
            Calls with many short rows need less memory with a smaller context: they are computed
            in micro-batches of about 16,384 tokens, but at least one row of this length.
        budget: Memory budgets; see `penstock.prepare`.
        live_forwards: Number of calls whose `backward()` may be outstanding at the same time. Each
            of them stores its own activations.
        loss_memory: Device memory for what you compute from the output of the last layer, such as
            `2GiB`. By default, enough for the logits of all tokens and their gradients.
        plan: Plan to follow; by default, the best plan for the budgets.
        machine: Machine to plan for. By default, this one.
        optimizer: Name of the optimizer, or its options; see `penstock.prepare`.
        param_groups: Function from named parameters to parameter groups; see `penstock.prepare`.
        compiled: Compile layers and use Penstock's own kernels. By default, if the GPU runs them.
        device: `cpu` or `cuda`. By default, the GPU if there is one.
        sweep_threads: Number of CPU threads of the optimizer sweep.
        store: Options of the store on NVMe.
        rehearse: Run every kind of layer once before memory is allocated; see `penstock.prepare`.
        progress: Called with work done, the total and a description while the engine is prepared.
        **arguments: Settings by name, as for `penstock.prepare`, for example `lr`, `weight_decay`,
            `freeze` and `seed`. `dtype` is that of the model by default. `clip` is None by default:
            call `clip_grad_norm_`.

    Returns:
        The model and its optimizer. Call `model.close()` at the end.
    """
    from penstock.autograd.model import connect
    from penstock.autograd.optimizer import StreamedModelOptimizer
    from penstock.autograd.peft_wrapper import PeftWrapper

    _check(tokens, live_forwards, arguments)
    towers = _towers_of(model)
    streamed = model if towers is None else towers.language_model
    config, dtype = _config_and_dtype(streamed, arguments)
    sizes = _sizes(config, tokens, context)
    given: dict[str, Any] = {"clip": None, **arguments, **sizes, "dtype": dtype}
    nbytes = 0 if loss_memory is None else parse_bytes(loss_memory)
    loss = CallerLoss(live_forwards=live_forwards, nbytes=nbytes)
    if towers is not None:
        loss = towers.planned(loss, tokens, sizes["context"], WEIGHT_FORMATS[dtype].weight)
        if towers.makes_masks and compiled is None:
            compiled = False  # compiled layers and kernels have no attention to later tokens
    engine = prepare(
        streamed, budget=budget, plan=plan, machine=machine, optimizer=optimizer,
        param_groups=param_groups, accumulate=True, compiled=compiled, device=device,
        sweep_threads=sweep_threads, store=store, rehearse=rehearse, progress=progress,
        caller_loss=loss, **given,
    )  # fmt: skip
    try:
        if towers is not None:
            _save_whole(engine, towers)
        connected = connect(_callers_model(streamed, config, engine, towers), engine, towers)
        if hasattr(model, "add_adapter") and hasattr(model, "active_peft_config"):
            connected.wrapper = PeftWrapper(model, connected.model, engine)
        settings, grouping = engine.settings.optimizer, engine.settings.grouping
        made = StreamedModelOptimizer(
            engine, connected.gradients, settings, grouping, connected.parameters
        )
        engine.optimizer = made
        engine.replace_weights(lambda _: None)  # fetch the head's
    except BaseException:
        if towers is not None:
            towers.disconnect()
        engine.close()
        raise
    return (connected.model if engine.live_model is None else model), made


def _check(tokens: int, live_forwards: int, arguments: Mapping[str, Any]) -> None:
    for name, value in (("tokens", tokens), ("live_forwards", live_forwards)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingsError(name, f"must be a number of 1 or more, got {value!r}")
    place = RankPlace.of()
    if place is not None and place.world > 1:
        raise SettingsError(
            "world_size",
            f"is {place.world}, but penstock.stream trains in one process. Start the script with "
            f"python; for supervised fine-tuning on several GPUs, use PenstockTrainer or "
            f"PenstockSFTTrainer with torchrun, or `penstock train --gpus {place.local_world}`",
        )
    for name in ("batch", "micro_batch"):
        if name in arguments:
            raise SettingsError(name, "is not a setting of penstock.stream; use tokens and context")


def _sizes(config: Any, tokens: int, context: int | None) -> dict[str, int]:
    """Return the context and the number of rows that have the memory for so many tokens."""
    from penstock.model.survey import max_context

    limit = max_context(config)
    length = min(tokens, tokens if limit is None else limit) if context is None else context
    if length > tokens:
        raise SettingsError("context", f"is {length}, but tokens is {tokens}; it must not be less")
    return {"context": length, "batch": -(-tokens // length)}


def _config_and_dtype(model: Any, arguments: Mapping[str, Any]) -> tuple[Any, Dtype]:
    """Return the model's config, and the type to compute in."""
    from penstock.model.adapters import without_wrapper
    from penstock.model.config import load_config

    if isinstance(model, str | Path):
        config = load_config(
            model,
            trust_remote_code=arguments.get("trust_remote_code", False),
            revision=arguments.get("revision"),
            changes=arguments.get("model_config", {}),
        )
        own = getattr(config, "dtype", None) or "bfloat16"
    else:
        model = without_wrapper(model)
        config, own = model.config, model.dtype
    return config, arguments.get("dtype") or _dtype_name(own)


def _dtype_name(dtype: torch.dtype | str) -> Dtype:
    """Return the type to compute in; SettingsError for another one than the engine has here."""
    known: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16"}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise SettingsError(
            "dtype",
            f"is that of the model by default, which is {name}, and penstock.stream computes in "
            f"bf16 or fp32; pass dtype='bf16' or dtype='fp32'",
        )
    return known[name]


def _towers_of(model: Any) -> Towers | None:
    """Return the modules of a live multimodal model that do not stream; None for other models."""
    if isinstance(model, str | Path):
        return None
    from penstock.autograd.towers import Towers
    from penstock.model.adapters import without_wrapper
    from penstock.model.language_model import is_multimodal

    whole = without_wrapper(model)
    return Towers(whole) if is_multimodal(whole) else None


def _save_whole(engine: Any, towers: Towers) -> None:
    """Let the engine save a multimodal model as a whole."""
    whole: Any = towers.whole
    engine.files.others = towers.tensors
    engine.model_files = replace(
        engine.model_files, config=whole.config, architecture=type(whole).__name__
    )


def _callers_model(model: Any, config: Any, engine: Any, towers: Towers | None) -> nn.Module:
    """Return the model that the caller gets: its own one, or a new one without weights."""
    from penstock.model.meta_model import build_model

    live = engine.live_model
    if live is not None:
        live.unguard()
        return live.model if towers is None else towers.whole
    device = engine.device.torch_device
    made = build_model(config, engine.split_model.dtype, device, own_attention=True)
    made.train()
    return made
