"""The update rules' constants for one step. Room: update.

Each is worked out here, in double, and rounded to fp32 once; native, GPU and reference code all
take these same numbers, so that none of them can differ by how it computes a bias correction.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields, replace
from typing import Literal

from penstock import _native

RuleName = Literal["adamw", "sgd", "lion"]

NUM_MOMENTS: dict[RuleName, int] = {"adamw": 2, "sgd": 1, "lion": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What multiplies what. `docs/sweep.md` has the formulas."""

    scale: float = 1.0
    """On the gradient as read: unscale times clip; negative to maximize."""
    l2: float = 0.0
    """Weight decay that is added to the gradient."""
    decay: float = 0.0
    """Learning rate times weight decay, taken off the master."""
    rate: float = 0.0
    """Learning rate; for AdamW with both bias corrections folded in."""
    fresh1: float = 1.0
    """Share of the new gradient in the first moment."""
    fresh2: float = 1.0
    """AdamW: share of its square in the second. Lion: share in the stored moment."""
    eps: float = 0.0
    """AdamW: with the second bias correction folded in."""
    keep: float = 0.0
    """SGD: momentum."""
    look: bool = False
    """SGD: Nesterov's look ahead."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "look":
                object.__setattr__(self, field.name, to_fp32(getattr(self, field.name)))

    def scaled(self, scale: float) -> Coefficients:
        """The same step with another scale on the gradient."""
        return replace(self, scale=scale)

    def native(self) -> _native.Coefficients:
        return _native.Coefficients(**{f.name: getattr(self, f.name) for f in fields(self)})


def adamw(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    scale: float = 1.0,
) -> Coefficients:
    """AdamW's step number `step` (from 1), or Adam's with L2 decay.

    `m_hat / (sqrt(v_hat) + eps)` equals `c m / (sqrt(v) + eps c2)` with `c2 = sqrt(1 - beta2^t)`
    and `c = c2 / (1 - beta1^t)`: one division, and no rounding of the corrected moments.
    """
    beta1, beta2 = betas
    correction2 = math.sqrt(1 - beta2**step)
    return Coefficients(
        scale=scale,
        l2=0.0 if decoupled else weight_decay,
        decay=lr * weight_decay if decoupled else 0.0,
        rate=lr * correction2 / (1 - beta1**step),
        fresh1=1 - beta1,
        fresh2=1 - beta2,
        eps=eps * correction2,
    )


def sgd(
    *,
    step: int,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    scale: float = 1.0,
) -> Coefficients:
    """torch's SGD: its first step takes the gradient undamped."""
    return Coefficients(
        scale=scale,
        l2=weight_decay,
        rate=lr,
        keep=momentum,
        fresh1=1.0 if step == 1 else 1 - dampening,
        look=nesterov,
    )


def lion(
    *, lr: float, betas: tuple[float, float], weight_decay: float, scale: float = 1.0
) -> Coefficients:
    """Lion (Chen et al., 2023): the sign of one average, and another one kept."""
    beta1, beta2 = betas
    return Coefficients(
        scale=scale, decay=lr * weight_decay, rate=lr, fresh1=1 - beta1, fresh2=1 - beta2
    )


def draw_key(seed: int, step: int, tensor_id: int) -> int:
    """Sixty-four bits for one tensor in one step (splitmix64 over the three)."""
    state = 0
    for word in (seed, step, tensor_id):
        state = (state + (word & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


_MASK64 = (1 << 64) - 1


def to_fp32(value: float) -> float:
    """To the nearest fp32, ties to even; beyond its range an infinity."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
