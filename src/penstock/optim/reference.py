"""The specification of every step, bit by bit, in plain torch operations.

Every operation rounds once, so this module does not use `addcmul`, `lerp` or `alpha=`: torch may
contract those to fused multiply-adds. It runs on any device, but slowly and with temporaries.
"""

from __future__ import annotations

import math

import torch

from penstock import _native
from penstock.optim import formats
from penstock.optim.rules import NUM_MOMENTS, Coefficients, RuleName

LEAF = _native.SWEEP_LEAF
LANES = _native.SWEEP_LANES

GRAD_LIMIT = 0x5F7FFFFF
"""Bit pattern of the largest fp32 number whose square is finite."""

WEIGHT_LIMIT = {
    torch.bfloat16: 0x7F7F7FFF,
    torch.float32: 0x7F7FFFFF,
    torch.float16: 0x477FEFFF,
}
"""Bit pattern of the largest master whose weight is finite, for each type of weight."""


def gradient(raw: torch.Tensor, master: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """Scale the gradient, add L2 regularization, and limit it to values with a finite square."""
    g = raw.float() * coefficients.scale
    g = g if coefficients.l2 == 0 else g + master * coefficients.l2
    bits = g.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    bounded = torch.where(magnitude > 0x7F800000, magnitude, magnitude.clamp(max=GRAD_LIMIT))
    return (bounded | (bits & -0x80000000)).view(torch.float32)


def blend(old: torch.Tensor, fresh: torch.Tensor, share: float) -> torch.Tensor:
    """Move `old` towards `fresh` by `share` of their difference."""
    return old + (fresh - old) * share


def root(value: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded fp32 square root, computed in fp64.

    `torch.sqrt` of fp32 is not correctly rounded: with AVX-512, torch 2.13 gets the last bit of
    one in 200 results wrong.
    """
    return torch.sqrt(value.double()).float()


Step = tuple[torch.Tensor, list[torch.Tensor]]
"""The new master and the new moments."""


def adamw_step(
    master: torch.Tensor, moments: list[torch.Tensor], g: torch.Tensor, coefficients: Coefficients
) -> Step:
    """Compute a step of AdamW."""
    first = blend(moments[0], g, coefficients.fresh1)
    second = blend(moments[1], g * g, coefficients.fresh2)
    update = (first / (root(second) + coefficients.eps)) * coefficients.rate
    return master - (update + master * coefficients.decay), [first, second]


def sgd_step(
    master: torch.Tensor, moments: list[torch.Tensor], g: torch.Tensor, coefficients: Coefficients
) -> Step:
    """Compute a step of SGD."""
    first = moments[0] * coefficients.keep + g * coefficients.fresh1
    ahead = g + first * coefficients.keep if coefficients.look else first
    update = ahead * coefficients.rate
    return master - (update + master * coefficients.decay), [first]


def lion_step(
    master: torch.Tensor, moments: list[torch.Tensor], g: torch.Tensor, coefficients: Coefficients
) -> Step:
    """Compute a step of Lion."""
    interpolated = blend(moments[0], g, coefficients.fresh1)
    up = torch.full_like(interpolated, coefficients.rate)
    down = torch.full_like(interpolated, -coefficients.rate)
    update = torch.where(interpolated > 0, up, torch.where(interpolated < 0, down, interpolated))
    first = blend(moments[0], g, coefficients.fresh2)
    return master - (update + master * coefficients.decay), [first]


_STEP = {"adamw": adamw_step, "sgd": sgd_step, "lion": lion_step}


def sweep(
    rule: RuleName,
    state: dict[str, torch.Tensor],
    grad: torch.Tensor,
    coefficients: Coefficients,
    *,
    key: int = 0,
    first_index: int = 0,
) -> int | None:
    """Update flat tensors in place; return the index of the first refused element, or None.

    `state` contains `weight`, `rest` (unless fp32) and the moments `first` and `second`, either
    plain or as codes with `first_base` and `second_base`. SGD without momentum has no `first`. An
    element is refused, and keeps its state, if its new weight would not be finite.
    """
    weight, rest = state["weight"], state.get("rest")
    master = formats.read_master(weight, rest)
    names = ("first", "second")[: NUM_MOMENTS[rule]]
    old = [_read(state, name, master) for name in names]
    next_master, next_moments = _STEP[rule](
        master, old, gradient(grad, master, coefficients), coefficients
    )
    refused = (next_master.view(torch.int32) & 0x7FFFFFFF) > WEIGHT_LIMIT[weight.dtype]
    _write_master(weight, rest, torch.where(refused, master, next_master))
    random = formats.draw_bits(key, first_index, grad.numel(), grad.device)
    for name, before, after in zip(names, old, next_moments, strict=True):
        random16 = random >> 16 if name == "first" else random & 0xFFFF
        _write(state, name, torch.where(refused, before, after), random16)
    return int(refused.nonzero()[0]) if bool(refused.any()) else None


def _read(state: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    if name not in state:
        return torch.zeros_like(like)
    if f"{name}_base" not in state:
        return state[name].float()
    decode = formats.decode_first if name == "first" else formats.decode_second
    return decode(state[name], state[f"{name}_base"])


def _write(
    state: dict[str, torch.Tensor], name: str, value: torch.Tensor, random16: torch.Tensor
) -> None:
    if name not in state:
        return
    if f"{name}_base" in state:
        encode = formats.encode_first if name == "first" else formats.encode_second
        code, base = encode(value, random16)
        state[name].copy_(code)
        state[f"{name}_base"].copy_(base)
    elif state[name].dtype == torch.bfloat16:
        state[name].copy_(formats.round_bf16(value, random16))
    else:
        state[name].copy_(value)


def _write_master(weight: torch.Tensor, rest: torch.Tensor | None, master: torch.Tensor) -> None:
    stored, stored_rest = formats.store_master(master, weight.dtype)
    weight.copy_(stored)
    if rest is not None and stored_rest is not None:
        rest.copy_(stored_rest)


NARROW_LEAST, NARROW_MOST = 2.0**-48, 2.0**48
"""Range of a leaf's largest element in which the squares of a 16-bit gradient fit in fp32."""

ROWS = 4
"""Number of rows of `LANES` elements whose squares are added in fp32."""


def leaf_sums(grad: torch.Tensor) -> torch.Tensor:
    """Return the fp64 sum of squares of every `LEAF` elements, in the specified order.

    Lane j has elements j, j + 32, j + 64, ... of its leaf. The last leaf is padded with zeros. A
    lane adds its squares in fp64. Squares of 16-bit gradients are exact in fp32, so there a lane
    adds four at a time in fp32, and these sums in fp64. Then the upper half of the lanes is added
    to the lower half, until one is left.
    """
    leaves = -(-grad.numel() // LEAF)
    padded = torch.zeros(leaves * LEAF, dtype=torch.float32, device=grad.device)
    padded[: grad.numel()] = grad.reshape(-1).float()
    rows = padded.view(leaves, LEAF // LANES, LANES)
    wide = rows.double()
    sums = _fold(wide * wide)
    if grad.dtype == torch.float32:
        return sums
    top = rows.abs().amax(dim=(1, 2))
    narrow = (top == 0) | ((top >= NARROW_LEAST) & (top < NARROW_MOST))
    squares = (rows * rows).view(leaves, LEAF // LANES // ROWS, ROWS, LANES)
    pairs = squares[:, :, 0::2] + squares[:, :, 1::2]
    return torch.where(narrow, _fold((pairs[:, :, 0] + pairs[:, :, 1]).double()), sums)


def _fold(rows: torch.Tensor) -> torch.Tensor:
    """Add rows one after the other, then lanes by halves."""
    lanes = torch.zeros_like(rows[:, 0])
    for i in range(rows.shape[1]):
        lanes = lanes + rows[:, i]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def sum_squares(grad: torch.Tensor) -> float:
    """Add the leaves without rounding, so that their order does not matter, then round once."""
    return math.fsum(leaf_sums(grad).tolist())
