"""Refuse methods and attributes of a trainer that have no effect with Penstock.

Some methods of transformers' Trainer are replaced by `PenstockTrainerMixin`, and others are never
called. A class or a script that overrides such a method expects a result that it would not get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.trainer_pt_utils import LabelSmoother

from penstock.errors import SettingsError

PATH_B = "penstock.stream(model, ...), which works with any loss and a plain Trainer"

_INPUTS = (
    "Penstock never calls it: change batches in the data collator, or in a training_step that "
    "calls super()"
)

_CONTEXT = (
    "The engine computes without it: set bf16 or fp16 for the type to compute in, or use " + PATH_B
)

NEVER_CALLED: Mapping[str, str] = {
    "compute_loss": f"The engine computes the loss chunk by chunk and never calls it: use {PATH_B}",
    "compute_loss_context_manager": _CONTEXT,
    "autocast_smart_context_manager": _CONTEXT,
    "_prepare_inputs": _INPUTS,
    "_prepare_input": _INPUTS,
    "_clip_grad_norm": "Gradients are in the engine, which clips them itself: set max_grad_norm, "
    f"or use {PATH_B}",
}
"""Methods of Trainer that have no effect, wherever they are overridden, and what to do instead."""

REPLACED = (
    "training_step",
    "prediction_step",
    "create_optimizer",
    "_get_grad_norm",
    "_move_model_to_device",
    "_wrap_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
)
"""Other methods that the mixin replaces, so that those of classes after it are not called."""

NEEDS_LOGITS = "cannot be called: it needs all logits, which the engine never has at one time"

LOSS_FUNCTION = f"{NEEDS_LOGITS}. Use {PATH_B}"


def check_overrides(trainer_class: type, mixin: type) -> None:
    """Raise SettingsError for a class whose methods the mixin would skip."""
    below = trainer_class.__mro__[trainer_class.__mro__.index(mixin) + 1 :]
    for name, advice in NEVER_CALLED.items():
        for owner in trainer_class.__mro__:
            if name in vars(owner) and not _is_known(owner):
                raise SettingsError(name, f"is overridden by {owner.__name__}. {advice}")
    for name in REPLACED:
        for owner in below:
            if name in vars(owner) and not _is_known(owner):
                raise SettingsError(
                    name,
                    f"is overridden by {owner.__name__}, and would not be called, because "
                    f"{mixin.__name__} comes before {owner.__name__} and replaces it. Override it "
                    f"in a class before {mixin.__name__} and call super() there, or use {PATH_B}",
                )


def _is_known(owner: type) -> bool:
    """Return whether Penstock does the same as a class: Trainer's code, TRL's for SFT, or its own.

    Seq2SeqTrainer differs from Trainer only with `predict_with_generate`, which is refused.
    """
    if owner in (transformers.Trainer, transformers.Seq2SeqTrainer):
        return True
    module = f"{owner.__module__}."
    return module.startswith("penstock.") or (
        module.startswith("trl.") and owner.__name__ in ("SFTTrainer", "_BaseTrainer")
    )


def check_attributes(trainer: Any) -> None:
    """Raise SettingsError for attributes of a trainer that were set after it was made."""
    for name, advice in NEVER_CALLED.items():
        if name in vars(trainer):
            raise SettingsError(name, f"is set on the trainer. {advice}")
    if trainer.compute_loss_func is not None:
        raise SettingsError("compute_loss_func", LOSS_FUNCTION)
    smoother, factor = trainer.label_smoother, trainer.args.label_smoothing_factor
    known = smoother is None or type(smoother) is LabelSmoother
    epsilon = 0.0 if smoother is None else getattr(smoother, "epsilon", None)
    if not known or epsilon != factor or getattr(smoother, "ignore_index", -100) != -100:
        raise SettingsError(
            "label_smoother",
            f"{NEEDS_LOGITS}. The engine smooths labels itself: set label_smoothing_factor in the "
            f"arguments before the trainer is made, or use {PATH_B}",
        )
