"""Penstock inside other tools: transformers' Trainer and TRL's SFTTrainer.

`PenstockTrainer` and `PenstockSFTTrainer` take the place of `Trainer` and `SFTTrainer` in a script,
with one more argument, a `PenstockConfig`. `PenstockTrainerMixin` does the same for a trainer class
of your own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.integrations.config import PenstockConfig
    from penstock.integrations.sft_trainer import PenstockSFTTrainer
    from penstock.integrations.trainer import PenstockTrainer, PenstockTrainerMixin

__all__ = ["PenstockConfig", "PenstockSFTTrainer", "PenstockTrainer", "PenstockTrainerMixin"]

_MODULES = {
    "PenstockConfig": "config",
    "PenstockSFTTrainer": "sft_trainer",
    "PenstockTrainer": "trainer",
    "PenstockTrainerMixin": "trainer",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock.integrations' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.integrations.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
