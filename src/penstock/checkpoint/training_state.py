"""What a checkpoint keeps beside the tensors. Room: keep.

The form of schedule, data position and the like is the business of those who own them; here they
are JSON that must come back as it went.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from penstock import records
from penstock.checkpoint.errors import StateError
from penstock.records import Json
from penstock.version import __version__

STATE = "training_state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """What can change a bit of the result besides the run's own numerics. "" is not known."""

    penstock: str = ""
    torch: str = ""
    transformers: str = ""
    cuda: str = ""

    gpu: str = ""
    """Its name; "" where the run had none."""

    @classmethod
    def here(cls, *, gpu: bool = True) -> Software:
        """Of this process; without the GPU's name for a run that does not use it."""
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
        """What is another now, for a person: a resume may then give other bits."""
        pairs = ((f.name, getattr(self, f.name), getattr(now, f.name)) for f in fields(self))
        return tuple(
            f"{name} was {was or 'none'} and is {is_now or 'none'}"
            for name, was, is_now in pairs
            if was != is_now
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Where a run stands."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT

    step: int
    """Optimizer steps taken."""

    software: Software
    """What wrote it."""

    schedule: Json = field(default_factory=dict)
    """Of the learning rate."""

    data: Json = field(default_factory=dict)
    """The position in the data."""

    rng: Json = field(default_factory=dict)
    """Seeds and generators' states."""

    numerics: Json = field(default_factory=dict)
    """The run's choices that can change a bit: a resume keeps them."""

    loss_scale: Json = None
    """Of fp16: the scale and its count; None for bf16."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise StateError("version", f"must be {self.FORMAT}, got {self.version}")
        if self.step < 0:
            raise StateError("step", f"must be 0 or more, got {self.step}")
        for name in ("schedule", "data", "rng", "numerics", "loss_scale"):
            _check_json(name, getattr(self, name))

    def save(self, folder: str | Path) -> None:
        """Into a checkpoint's directory."""
        records.save(self, Path(folder) / STATE, error=StateError)

    @classmethod
    def load(cls, folder: str | Path) -> TrainingState:
        """From a checkpoint's directory. StateError names the field that is wrong."""
        return records.load(cls, Path(folder) / STATE, error=StateError)


def _check_json(name: str, value: Any) -> None:
    """What would come back changed (tuples, keys that are no text, NaN) is refused here."""
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError) as wrong:
        raise StateError(name, f"must be plain JSON: {wrong}") from None
    if not same:
        raise StateError(name, "must be plain JSON: lists for tuples, texts for keys")
