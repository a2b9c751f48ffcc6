"""Refuse arguments of a trainer that Penstock cannot follow, before any memory is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import SettingsError
from penstock.integrations.several_ranks import check_launch

logger = logging.getLogger(__name__)

PATH_B = "penstock.stream(model, ...), which works with any loss and a plain Trainer"

ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` that ask for AdamW."""

ONLY_ADAMW = f"Penstock trains with AdamW: set optim to {' or '.join(ADAMW)}"

LIBRARIES = ("transformers.", "trl.", "penstock.")
"""Packages whose own `compute_loss` is next-token cross-entropy, as the engine computes it."""


def check_before_init(trainer_class: type, arguments: Mapping[str, Any]) -> None:
    """Check what a trainer was given, before it loads a model or moves one to a device."""
    _check_loss(trainer_class, arguments)
    _check_optimizers(arguments)
    args, chosen = arguments.get("args"), arguments.get("optimizer_cls_and_kwargs")
    if chosen is not None:
        adamw_options(*chosen)
    elif args is not None:
        _check_optim(args.optim)
    if args is not None:
        check_training_arguments(args)


def _check_loss(trainer_class: type, arguments: Mapping[str, Any]) -> None:
    owner = next(c for c in trainer_class.__mro__ if "compute_loss" in vars(c))
    if not f"{owner.__module__}.".startswith(LIBRARIES):
        raise SettingsError(
            "compute_loss",
            f"is overridden by {owner.__name__}. The engine computes the loss chunk by chunk and "
            f"never calls it: use {PATH_B}",
        )
    if arguments.get("compute_loss_func") is not None:
        raise SettingsError(
            "compute_loss_func",
            f"cannot be called: it needs all logits, which the engine never has at one time. Use "
            f"{PATH_B}",
        )


def _check_optimizers(arguments: Mapping[str, Any]) -> None:
    optimizer, scheduler = arguments.get("optimizers") or (None, None)
    if optimizer is not None or scheduler is not None:
        raise SettingsError(
            "optimizers",
            "cannot be passed: Penstock's optimizer is part of its engine, and exists only once "
            "memory is planned. Set optim, learning_rate, weight_decay and lr_scheduler_type in "
            "the arguments, or override create_scheduler",
        )


def check_training_arguments(args: Any) -> None:
    """Raise SettingsError for arguments that Penstock cannot follow."""
    refused = {
        "deepspeed": "is another engine that moves weights; leave it out",
        "fsdp": "shards the model over processes; leave it out",
        "parallelism_config": "splits the model over processes; leave it out",
        "auto_find_batch_size": "reduces the batch when memory runs out. Penstock plans memory "
        "before the first step, so leave it out; if nothing fits, the message says how much does",
        "use_liger_kernel": "replaces parts of the model. Penstock has a fused loss of its own: "
        "leave it out",
        "activation_offloading": "moves activations, which Penstock does by its plan; leave it out",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise SettingsError(name, reason)
    if any(getattr(option, "value", "") == "underflow_overflow" for option in args.debug):
        raise SettingsError("debug", "underflow_overflow hooks into layers that Penstock replaces")
    if getattr(args, "torch_compile", False):
        logger.warning("torch_compile is ignored: Penstock compiles the layers itself on a GPU")


def check_devices(args: Any) -> None:
    """Raise SettingsError unless each process trains on one device."""
    check_launch(args)
    if args.n_gpu > 1:
        raise SettingsError(
            "n_gpu",
            f"is {args.n_gpu}: Trainer would copy the model to all visible GPUs (DataParallel). "
            f"Start the script with torchrun to train on all of them, or make one visible, for "
            f"example with CUDA_VISIBLE_DEVICES=0",
        )


def switch_off_checkpointing(args: Any) -> None:
    """Switch gradient checkpointing off: the engine recomputes every layer in backward anyway."""
    if args.gradient_checkpointing:
        logger.info(
            "gradient_checkpointing is switched off: Penstock saves only the inputs of layers and "
            "recomputes the rest in any case"
        )
        args.gradient_checkpointing = False


def adamw_options(optimizer_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of AdamW that the engine takes, from those of a torch optimizer."""
    if optimizer_class is not torch.optim.AdamW:
        name = getattr(optimizer_class, "__name__", str(optimizer_class))
        raise SettingsError("optimizer_cls_and_kwargs", f"has {name}; {ONLY_ADAMW}")
    known = {"lr", "betas", "eps", "weight_decay"}
    harmless = {"fused", "foreach", "capturable", "differentiable"}
    unknown = [n for n in options if n not in known | harmless and options[n]]
    if unknown:
        raise SettingsError(
            "optimizer_cls_and_kwargs",
            f"has {', '.join(unknown)}; Penstock's AdamW takes {', '.join(sorted(known))}",
        )
    return {name: value for name, value in options.items() if name in known}


def _check_optim(optim: Any) -> None:
    """Refuse other optimizers before transformers asks for their packages."""
    name = str(getattr(optim, "value", optim))
    if name not in ADAMW:
        eight = "; for moments of 8 bits, pass PenstockConfig(moments='int8')"
        raise SettingsError("optim", f"is {name}; {ONLY_ADAMW}" + (eight if "8bit" in name else ""))
