"""Refuse arguments of a trainer that Penstock cannot follow, before any memory is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.errors import SettingsError
from penstock.integrations.config import PenstockConfig
from penstock.integrations.optimizer_choice import check_optimizer, chooses_optimizer
from penstock.integrations.override_checks import LOSS_FUNCTION, check_overrides
from penstock.integrations.several_ranks import check_launch

logger = logging.getLogger(__name__)

OPTIMIZERS = (
    "cannot be passed: Penstock's optimizer is part of its engine, and exists only once memory is "
    "planned. Set optim, learning_rate, weight_decay and lr_scheduler_type in the arguments, or "
    "PenstockConfig(optimizer=...), or override create_scheduler"
)


def check_before_init(
    trainer_class: type, mixin: type, arguments: Mapping[str, Any], config: PenstockConfig
) -> None:
    """Check what a trainer was given, before it loads a model or moves one to a device."""
    check_overrides(trainer_class, mixin)
    if arguments.get("compute_loss_func") is not None:
        raise SettingsError("compute_loss_func", LOSS_FUNCTION)
    if any(each is not None for each in arguments.get("optimizers") or ()):
        raise SettingsError("optimizers", OPTIMIZERS)
    args = arguments.get("args")
    named = None if chooses_optimizer(trainer_class) else args
    check_optimizer(config, named, arguments.get("optimizer_cls_and_kwargs"))
    if args is not None:
        check_training_arguments(args)


def check_optimizer_attributes(trainer: Any, own: type) -> None:
    """Raise SettingsError for an optimizer or a scheduler that was set on the trainer.

    `own` is the class of the optimizer that an earlier `train` has left behind.
    """
    if trainer.optimizer is not None and not isinstance(trainer.optimizer, own):
        raise SettingsError("optimizer", OPTIMIZERS)
    scheduler = trainer.lr_scheduler
    made_by_trainer = scheduler is None or trainer._created_lr_scheduler
    if not made_by_trainer and getattr(scheduler, "optimizer", None) is not trainer.optimizer:
        raise SettingsError("lr_scheduler", OPTIMIZERS)


def check_training_arguments(args: Any) -> None:
    """Raise SettingsError for arguments that Penstock cannot follow."""
    refused = {
        "predict_with_generate": "generates text with the model, whose weights are in the engine. "
        "Leave it out, and generate after train() has returned",
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
