"""The auxiliary loss of a model with experts, where a trainer and the engine agree on it.

transformers adds it to the loss of each call of the model: once per micro-batch of Trainer. The
engine uses the mean over its own micro-batches, weighted by their tokens with a label. The two are
equal if an optimizer step is one micro-batch of both.
"""

from __future__ import annotations

from typing import Any

from penstock.engine.engine import Engine
from penstock.errors import SettingsError
from penstock.integrations.config import PenstockConfig
from penstock.integrations.window import Window
from penstock.model.adapters import without_wrapper
from penstock.model.router_loss import RouterLoss

OFF = "switch the auxiliary loss off with model.config.output_router_logits = False"


def choose_micro_batch(trainer: Any, config: PenstockConfig, rows: int) -> int | None:
    """Return the micro-batch with which losses are those of Trainer; None for any.

    `rows` is the number of sequences of an optimizer step. Raises SettingsError if there is no such
    micro-batch.
    """
    model_config: Any = without_wrapper(trainer.model).config
    loss = RouterLoss.of(model_config)
    if loss is None or not loss.coefficient:
        return None
    args = trainer.args
    if args.label_smoothing_factor:
        raise SettingsError(
            "label_smoothing_factor",
            f"is {args.label_smoothing_factor:g}, and Trainer leaves out the auxiliary loss of "
            f"routers with it, which the model's config asks for: {OFF}",
        )
    for name, count in (
        ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        ("world_size", args.world_size),
    ):
        if count > 1 and (trainer.is_in_train or name == "world_size"):
            raise SettingsError(
                name,
                f"is {count}, and the model's config asks for the auxiliary loss of routers. "
                f"Trainer adds up the auxiliary losses of all micro-batches of a step, and the "
                f"engine uses their mean. Use 1 and a larger per_device_train_batch_size, or {OFF}",
            )
    if config.micro_batch != "auto" and int(config.micro_batch) < rows:
        raise SettingsError(
            "micro_batch",
            f"is {config.micro_batch}, and the model's config asks for the auxiliary loss of "
            f"routers, which Trainer computes for the whole batch of {rows} sequences. Pass "
            f"PenstockConfig(micro_batch={rows}), or {OFF}",
        )
    evaluated = args.per_device_eval_batch_size
    if trainer.is_in_train and str(args.eval_strategy.value) != "no" and evaluated > rows:
        raise SettingsError("per_device_eval_batch_size", _evaluates_too_many(evaluated, rows))
    return rows


def check_auxiliary_evaluation(engine: Engine, window: Window) -> None:
    """Raise SettingsError if the loss of an evaluation batch would not be that of Trainer."""
    if engine.split_model.router_loss is None:
        return
    rows, most = window.owners.shape[0], engine.workload.numerics.micro_batch
    if rows > most:
        raise SettingsError("per_device_eval_batch_size", _evaluates_too_many(rows, most))


def _evaluates_too_many(rows: int, most: int) -> str:
    return (
        f"must be {most} or less, got a batch of {rows}: the model's config asks for the auxiliary "
        f"loss of routers, which Trainer computes for whole batches, and the engine for "
        f"micro-batches of {most}. Reduce it, or {OFF}"
    )
