"""What an engine is told beside its plan, and what it tells. Room: move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.stream.groups import Grouping
from penstock.stream.homes import StoreSettings
from penstock.stream.loss import LossFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What cannot change a bit of the result, and what the caller adds to the workload."""

    optimizer: Mapping[str, Any]
    grouping: Grouping
    loss: LossFunction | None = None
    seed: int = 0
    store: StoreSettings = field(default_factory=StoreSettings)
    sweep_threads: int | None = None
    nonfinite: str = "raise"
    """`raise`, or `skip`: leave the step out and go on. fp16 always skips, and halves its scale."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean over trained tokens."""

    loss: float
    tokens: int
