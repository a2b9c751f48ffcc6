"""Compare the model that a resume names with the model of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.engine.engine import EngineState
from penstock.errors import EngineStateError
from penstock.model.inventory import Inventory
from penstock.settings import Settings
from penstock.train.errors import ModelChangedError, TrainedTensorsError
from penstock.train.inputs import Note
from penstock.train.resume import ResumePoint
from penstock.train.saved_settings import read_saved_settings


def keep_model(settings: Settings, point: ResumePoint | None, note: Note) -> Settings:
    """Return the settings with the model of the run, and the weights that it started from.

    A run that trains all parameters reads everything from its checkpoint: another model would be
    recorded without having been used. The frozen weights of an adapter come from the model, which
    may be elsewhere now; `Engine.read` compares them with the ones that the adapter was trained on.

    Raises ModelChangedError if another model is named, before anything is allocated. `point` is
    None if the run has no checkpoint yet.
    """
    saved = _saved_values(settings)
    chosen, former = settings.model, saved.get("model") or settings.model.model
    if _is_moved(former, chosen.model):
        if point is None or not (chosen.lora or _may_be_moved(former, settings, point)):
            raise ModelChangedError(settings.checkpoint.out, model=former, given=chosen.model)
        kept = "" if chosen.lora else f", and stays {former} in its records"
        note(f"note: the run's model was {former}, and is {chosen.model} now{kept}")
    if point is None:
        return settings
    init = saved.get("init", chosen.init)
    if init != chosen.init:
        note(
            f"note: --init {chosen.init} has no effect: the run started from {init} weights, and "
            f"continues from its checkpoint"
        )
    return settings.replace({"init": init} | ({} if chosen.lora else {"model": former}))


def check_tensors(settings: Settings, inventory: Inventory, point: ResumePoint) -> None:
    """Raise an error if the checkpoint has other tensors, or others that are trained.

    `Engine.read` checks this too, but only after the run has allocated its memory.
    """
    try:
        saved = EngineState.load(point.checkpoint.path).fingerprint
    except EngineStateError:
        return  # `Engine.read` says what is wrong with it
    if saved == inventory.fingerprint:
        return
    former = _saved_values(settings).get("model") or settings.model.model
    if _is_moved(former, settings.model.model):
        raise ModelChangedError(settings.checkpoint.out, model=former, given=settings.model.model)
    changes = point.changed_settings(settings, ("lora", "freeze", "model_config"))
    raise TrainedTensorsError(str(point.checkpoint.path), changes)


def _saved_values(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _, layer in read_saved_settings(settings.checkpoint.out).layers:
        values |= layer
    return values


def _is_moved(former: str, given: str) -> bool:
    """Return whether two names do not lead to the same model."""
    if former == given:
        return False
    try:
        return not os.path.samefile(former, given)
    except OSError:
        return True


def _may_be_moved(former: str, settings: Settings, point: ResumePoint) -> bool:
    """Return whether a directory may be the run's model, which is not where it was."""
    from penstock.engine.model_source import inspect_model

    given = settings.model.model
    if Path(former).exists() or not Path(given).is_dir():
        return False
    _, inventory = inspect_model(given, settings)
    return EngineState.load(point.checkpoint.path).fingerprint == inventory.fingerprint
