"""Refuse arguments of a trainer that Penstock cannot follow, before any memory is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.errors import SettingsError
from penstock.integrations.config import PenstockConfig
from penstock.integrations.optimizer_choice import check_optimizer
from penstock.integrations.several_ranks import check_launch

logger = logging.getLogger(__name__)

PATH_B = "penstock.stream(model, ...), which works with any loss and a plain Trainer"

LIBRARIES = ("transformers.", "trl.", "penstock.")
"""Packages whose own `compute_loss` is next-token cross-entropy, as the engine computes it."""


def check_before_init(
    trainer_class: type, arguments: Mapping[str, Any], config: PenstockConfig
) -> None:
    """Check what a trainer was given, before it loads a model or moves one to a device."""
    _check_loss(trainer_class, arguments)
    _check_optimizers(arguments)
    args = arguments.get("args")
    check_optimizer(config, args, arguments.get("optimizer_cls_and_kwargs"))
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
            "the arguments, or PenstockConfig(optimizer=...), or override create_scheduler",
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
