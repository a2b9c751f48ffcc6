"""The part of a checkpoint that is not tensors: training_state.json.

One file holds everything that a resume needs besides the tensors. The learning-rate schedule, the
position in the data and the engine's state belong to other modules, which define and check their
form. This module keeps them as JSON and makes sure that they come back unchanged.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from penstock import records
from penstock.checkpoint.errors import StateError
from penstock.records import Json
from penstock.version import __version__

STATE = "training_state.json"

OLD_ENGINE_STATE = "engine.json"
"""File in which checkpoints of version 1 keep the engine's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Versions and hardware that can change the trained weights; "" if unknown."""

    penstock: str = ""
    torch: str = ""
    transformers: str = ""
    cuda: str = ""

    gpu: str = ""
    """Name of the GPU; "" if the run uses none."""

    @classmethod
    def here(cls, *, gpu: bool = True) -> Software:
        """Describe this process. Pass `gpu=False` for a run that does not use the GPU."""
        try:
            transformers = importlib.metadata.version("transformers")
        except importlib.metadata.PackageNotFoundError:
            transformers = ""
        return cls(
            penstock=__version__,
            torch=str(torch.__version__),
            transformers=transformers,
            cuda=torch.version.cuda or "",
            gpu=torch.cuda.get_device_name() if gpu and torch.cuda.is_available() else "",
        )

    def differences(self, now: Software) -> tuple[str, ...]:
        """Describe what differs now. With any difference, a resume may not be bit-identical."""
        pairs = ((f.name, getattr(self, f.name), getattr(now, f.name)) for f in fields(self))
        return tuple(
            f"{name} was {was or 'none'} and is {is_now or 'none'}"
            for name, was, is_now in pairs
            if was != is_now
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Everything that a resume needs besides the tensors.

    `Engine.write` fills in the engine's part only; `penstock train` fills in everything.
    """

    FORMAT: ClassVar[int] = 2
    """Version 1 had the engine's state in a second file, and some of it in both."""

    version: int = FORMAT

    engine: Json = field(default_factory=dict)
    """State of the engine: steps, seed, loss scale and parameter groups."""

    software: Software = field(default_factory=Software)
    """Software and hardware that wrote the checkpoint."""

    schedule: Json = field(default_factory=dict)
    """The learning-rate schedule."""

    data: Json = field(default_factory=dict)
    """Position in the data."""

    numerics: Json = field(default_factory=dict)
    """Choices of the run that can change its result. A resume keeps them."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise StateError("version", f"must be {self.FORMAT}, got {self.version}")
        for name in ("engine", "schedule", "data", "numerics"):
            _check_json(name, getattr(self, name))

    def save(self, folder: str | Path) -> None:
        """Write the state into a checkpoint's directory."""
        records.save(self, Path(folder) / STATE, error=StateError)

    @classmethod
    def load(cls, folder: str | Path) -> TrainingState:
        """Read the state from a checkpoint's directory, of this version or version 1.

        Raises StateError, which names the invalid field.
        """
        path = Path(folder) / STATE
        data = _upgrade(records.read_json(path, StateError), folder)
        return records.from_json(cls, data, where=str(path), error=StateError)


def engine_state_file(folder: str | Path) -> Path:
    """Return the file of a checkpoint that has the engine's state."""
    path, old = Path(folder) / STATE, Path(folder) / OLD_ENGINE_STATE
    return old if not path.exists() and old.exists() else path


def read_engine_state(folder: str | Path) -> tuple[Json, Path]:
    """Read the engine's state from a checkpoint's directory, and name the file it is in.

    Version 1 kept it in engine.json, with or without a training_state.json next to it.
    """
    path = engine_state_file(folder)
    if path.name == OLD_ENGINE_STATE:
        return records.read_json(path, StateError), path
    state = TrainingState.load(folder)
    if not state.engine:
        problem = "is missing: the checkpoint was saved without optimizer states"
        raise StateError("engine", problem, where=str(path))
    return state.engine, path


def _upgrade(data: object, folder: str | Path) -> object:
    """Convert version 1: its `step`, `rng` and `loss_scale` repeat what engine.json says."""
    if not isinstance(data, Mapping) or data.get("version") != 1:
        return data
    kept = {k: v for k, v in data.items() if k not in ("version", "step", "rng", "loss_scale")}
    # A checkpoint with weights only has no engine.json.
    old = Path(folder) / OLD_ENGINE_STATE
    engine = records.read_json(old, StateError) if old.exists() else {}
    return {"version": TrainingState.FORMAT, "engine": engine, **kept}


def _check_json(name: str, value: Any) -> None:
    """Refuse values that would not come back unchanged: tuples, keys that are not text, NaN."""
    try:
        unchanged = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError) as wrong:
        raise StateError(name, f"must be plain JSON: {wrong}") from None
    if not unchanged:
        raise StateError(name, "must be plain JSON: lists instead of tuples, text keys only")
