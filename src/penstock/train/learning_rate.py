"""The learning rate over a run. Room: show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.settings import Schedule, Settings

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of the highest rate, as a pure function of steps taken: it has no state to lose."""

    schedule: Schedule
    warmup: int
    """Steps over which it rises."""
    steps: int
    """Of the whole run."""

    @classmethod
    def of(cls, settings: Settings, steps: int) -> Rate:
        """A warmup below 1 is a share of the steps."""
        wanted = settings.schedule.warmup
        warmup = math.ceil(wanted * steps) if wanted < 1 else round(wanted)
        return cls(settings.schedule.schedule, min(warmup, steps), steps)

    def __call__(self, taken: int) -> float:
        """For the step after `taken` others, as Hugging Face has it: a warmup begins at zero."""
        if taken < self.warmup:
            return taken / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = (taken - self.warmup) / max(1, self.steps - self.warmup)
        done = min(1.0, done)
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    def scheduler(self, optimizer: Any, *, taken: int, highest: float) -> LambdaLR:
        """On a torch optimizer that has taken so many steps."""
        from torch.optim.lr_scheduler import LambdaLR

        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"] = highest
        return LambdaLR(optimizer, self, last_epoch=taken - 1)
