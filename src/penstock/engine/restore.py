"""Give trained weights to a model in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from penstock.engine.state_view import StateView
from penstock.errors import EngineError, ModelRestoreError
from penstock.machine.limits import host_memory
from penstock.machine.sysfs import System
from penstock.model.live_model import LiveModel
from penstock.model.split import find_holders

TRAINING = (
    "has no weights now: they are in the engine that trains it. To train, call engine.step(batch); "
    "for a loss, engine.evaluate(batches); to save, engine.write(folder). For everything else, "
    "engine.restore(model) gives it a copy of the weights as they are now, and engine.close() the "
    "trained weights"
)

SHELL = (
    "has no weights: its engine could not give them back when it was closed. Load what "
    "engine.write(folder) saved with AutoModelForCausalLM.from_pretrained(folder)"
)


class ModelNotRestoredWarning(UserWarning):
    """A model that was passed to `prepare` has no weights after `close`, or on another device."""


def restore_live(live: LiveModel, state: StateView) -> None:
    """Give a model its weights back, in host memory. Raise ModelRestoreError if they do not fit."""
    check_host_memory(type(live.model).__name__, live.nbytes)
    live.load(state.weight)


def check_host_memory(name: str, needed: int) -> None:
    """Raise ModelRestoreError if a copy of the weights does not fit in host memory."""
    free = host_memory(System()).free
    if needed > free:
        raise ModelRestoreError(name, wanted=needed, free=free)


def load_into(model: nn.Module, state: StateView) -> None:
    """Copy the weights into another model with the same tensors, in place."""
    holders = find_holders(model)
    targets = {name: pair[0][0]._parameters[pair[0][1]] for name, pair in holders.items()}
    _check_same(targets, state)
    with torch.no_grad():
        for name, parameter in targets.items():
            assert parameter is not None
            parameter.copy_(state.weight(name, parameter.dtype))


def _check_same(targets: Mapping[str, nn.Parameter | None], state: StateView) -> None:
    if missing := sorted(set(state) ^ set(targets)):
        raise EngineError(
            f"the model and the engine have different tensors: {missing[0]} is only in "
            f"{'the engine' if missing[0] in state else 'the model'}"
        )
    for name, parameter in targets.items():
        assert parameter is not None
        if parameter.shape != state.shape(name) or parameter.is_meta:
            has = "no memory" if parameter.is_meta else f"the shape {tuple(parameter.shape)}"
            raise EngineError(
                f"{name} has {has} in the model, and the shape {state.shape(name)} in the engine"
            )


def give_back(live: LiveModel, state: StateView) -> bool:
    """Give a model its weights back before its engine is closed; warn if that is not possible."""
    try:
        restore_live(live, state)
    except Exception as problem:  # also an I/O error: the engine must release its memory
        live.guard(SHELL)
        text = f"the model that was passed to prepare has no weights now: {problem}"
        warnings.warn(text, ModelNotRestoredWarning, stacklevel=3)
        return False
    return True


def move_back(live: LiveModel) -> None:
    """Move a model to the devices where it was; it stays in host memory if it does not fit."""
    try:
        live.move_to_former_devices()
    except torch.cuda.OutOfMemoryError:
        warnings.warn(
            f"the trained {type(live.model).__name__} stays in host memory: the GPU has too little "
            f"free memory for its weights",
            ModelNotRestoredWarning,
            stacklevel=4,
        )
