"""The loss scale of fp16, as torch's GradScaler has it. Room: move."""

from __future__ import annotations

from dataclasses import dataclass

GROWTH_INTERVAL = 2000
"""Steps without overflow until the scale is doubled."""


@dataclass(slots=True)
class LossScale:
    """Keeps small gradients inside fp16's range; 1 and fixed for bf16."""

    value: float = 1.0
    good_steps: int = 0
    fixed: bool = True

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        return cls() if dtype == "bf16" else cls(value=65536.0, fixed=False)

    def took_step(self) -> None:
        if self.fixed:
            return
        self.good_steps += 1
        if self.good_steps >= GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    def overflowed(self) -> None:
        self.value, self.good_steps = max(self.value / 2, 1.0), 0
