"""Constants of the update rules for one step.

Each constant is computed here in double precision and rounded to fp32 once. The native core, the
GPU kernels and the reference use these numbers, so that none of them can differ in how it computes
a bias correction.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from typing import Literal

from penstock import _native

RuleName = Literal["adamw", "sgd", "lion"]

NUM_MOMENTS: dict[RuleName, int] = {"adamw": 2, "sgd": 1, "lion": 1}
"""Number of moments of each rule."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Constants of one step. `docs/sweep.md` has the formulas.

    The names are those of the native struct. `fresh1` and `fresh2` are shares of the new gradient;
    `1 - fresh1` and `1 - fresh2` are the betas.
    """

    scale: float = 1.0
    """Factor on the gradient: loss unscaling times clipping; negative to maximize."""
    l2: float = 0.0
    """L2 regularization: weight decay that is added to the gradient."""
    decay: float = 0.0
    """Decoupled weight decay: learning rate times weight decay, subtracted from the master."""
    rate: float = 0.0
    """Learning rate; for AdamW, including both bias corrections."""
    fresh1: float = 1.0
    """Share of the new gradient in the first moment. AdamW: `1 - beta1`. SGD: `1 - dampening`, or 1
    in the first step. Lion: `1 - beta1`, in the average whose sign is the update; this average is
    not stored."""
    fresh2: float = 1.0
    """AdamW: share of the squared gradient in the second moment, `1 - beta2`. Lion: share of the
    gradient in the stored moment, `1 - beta2`. SGD does not use it."""
    eps: float = 0.0
    """AdamW: epsilon, including the second bias correction."""
    keep: float = 0.0
    """SGD: momentum, the share of the old moment that is kept. Other rules do not use it."""
    look: bool = False
    """SGD: whether to use Nesterov momentum (look ahead). Other rules do not use it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "look":
                object.__setattr__(self, field.name, to_fp32(getattr(self, field.name)))

    def native(self) -> _native.Coefficients:
        """Return the constants for the native core."""
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
    """Return the constants of AdamW for step number `step` (from 1), or of Adam with L2.

    `m_hat / (sqrt(v_hat) + eps)` equals `c m / (sqrt(v) + eps c2)` with `c2 = sqrt(1 - beta2^t)`
    and `c = c2 / (1 - beta1^t)`. This needs one division and does not round corrected moments.
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
    """Return the constants of SGD. As in torch, the first step does not dampen the gradient."""
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
    """Return the constants of Lion: it steps by the sign of one average and stores another."""
    beta1, beta2 = betas
    return Coefficients(
        scale=scale, decay=lr * weight_decay, rate=lr, fresh1=1 - beta1, fresh2=1 - beta2
    )


def draw_key(seed: int, step: int, tensor_id: int) -> int:
    """Return a 64-bit key for one tensor in one step (splitmix64 over the arguments)."""
    state = 0
    for word in (seed, step, tensor_id):
        state = (state + (word & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def to_fp32(value: float) -> float:
    """Round to the nearest fp32, ties to even. Values beyond its range become infinite."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
