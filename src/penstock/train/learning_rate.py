"""The learning rate over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.settings import Schedule, Settings

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR


DECAY = 0.1
"""Fraction of all steps over which `wsd` decays by default."""


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """A factor of the peak learning rate, as a pure function of the number of steps taken.

    A checkpoint therefore needs no scheduler state to resume to the bit.
    """

    # After warmup the shapes are those of transformers.get_scheduler, but it is not used: its
    # linear schedule computes (steps - taken) / (steps - warmup) and rounds differently from
    # `1 - done` below, its cosine rises again after the last step, and its warmup wastes a step at
    # rate 0. Resumed runs must see the same bits.

    schedule: Schedule
    warmup: int
    """Number of steps over which the rate rises linearly. They never cover the run."""
    steps: int
    """Number of steps in the run."""
    floor: float = 0.0
    """Factor at the end of the run."""
    decay: int = 0
    """Number of steps at the end over which `wsd` decays."""
    from_zero: bool = False
    """Whether warmup begins at 0 and may cover the run, as in runs of Penstock 0.1."""

    @classmethod
    def of(cls, settings: Settings, steps: int, *, from_zero: bool = False) -> LearningRateSchedule:
        """Build the schedule of a run. A warmup below 1 is a fraction of the steps."""
        chosen = settings.schedule
        most = steps if from_zero else max(0, steps - 1)
        warmup = min(_count(chosen.warmup, steps), most)
        decay = 0
        if chosen.schedule == "wsd":
            decay = min(
                _count(DECAY if chosen.decay is None else chosen.decay, steps), steps - warmup
            )
        floor = chosen.min_lr / chosen.lr if chosen.min_lr else 0.0
        return cls(chosen.schedule, warmup, steps, floor, decay, from_zero)

    def __call__(self, taken: int) -> float:
        """Return the factor for the next step, after `taken` steps."""
        if taken < self.warmup:
            return taken / self.warmup if self.from_zero else (taken + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return 1.0
        length = self.decay if self.schedule == "wsd" else self.steps - self.warmup
        done = (taken - (self.steps - length)) / max(1, length)
        done = min(1.0, max(0.0, done))
        shape = 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * shape if self.floor else shape

    def scheduler(self, optimizer: Any, *, taken: int, peak: float) -> LambdaLR:
        """Make a torch scheduler for an optimizer that has taken `taken` steps."""
        from torch.optim.lr_scheduler import LambdaLR

        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"] = peak
        return LambdaLR(optimizer, self, last_epoch=taken - 1)


def _count(length: float, steps: int) -> int:
    """Return a number of steps that may be given as a fraction of all steps."""
    return math.ceil(length * steps) if length < 1 else round(length)
