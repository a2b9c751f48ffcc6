"""Storage formats of weights and moments. `docs/sweep.md` explains each.

Everything here is plain torch and works on any device. It defines the exact bits: the sweeps on the
CPU and on the GPU must agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from penstock import _native
from penstock.errors import SweepInputError

Moments = Literal["fp32", "bf16", "int8"]

BLOCK = _native.SWEEP_MOMENT_BLOCK
"""Number of elements of a tensor that share one base of 8-bit moments."""

_GRID_SHIFT = 20
_GRID_TOP = 0x7F7
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -0x80000000
_MASK32 = 0xFFFFFFFF

_MOMENT_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_REST = {torch.bfloat16: ("low", torch.int16), torch.float16: ("master", torch.float32)}
"""What a weight's fp32 master needs in addition to the weight, by the type of the weight. An fp32
weight is its own master."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """The state stored for each parameter, without its gradient."""

    weight: torch.dtype = torch.bfloat16
    """Type of the weight. A bf16 weight and its remainder form the fp32 master; an fp16 weight is
    stored in addition to the master; an fp32 weight is its own master."""
    moments: Moments = "fp32"
    """Storage format of the moments."""
    num_moments: int = 2
    """Number of moments."""

    def __post_init__(self) -> None:
        if self.weight not in (torch.float32, torch.bfloat16, torch.float16):
            raise SweepInputError("weight", f"must be fp32, bf16 or fp16, got {self.weight}")
        if self.moments not in _MOMENT_DTYPE:
            raise SweepInputError(
                "moments", f"must be 'fp32', 'bf16' or 'int8', got {self.moments!r}"
            )

    @property
    def rest(self) -> tuple[str, torch.dtype] | None:
        """Name and type of the rest of the master weight; None for fp32."""
        return _REST.get(self.weight)

    @property
    def moment_dtype(self) -> torch.dtype:
        """Type of the stored moments; uint8 for codes."""
        return _MOMENT_DTYPE[self.moments]

    def nbytes(self, numel: int) -> dict[str, int]:
        """Return the bytes of each role for a tensor of `numel` elements."""
        roles = {"weight": numel * self.weight.itemsize}
        if self.rest is not None:
            roles[self.rest[0]] = numel * self.rest[1].itemsize
        for name in ("first", "second")[: self.num_moments]:
            roles[name] = numel * self.moment_dtype.itemsize
            if self.moments == "int8":
                roles[f"{name}_base"] = num_blocks(numel) * torch.int16.itemsize
        return roles

    def bytes_per_parameter(self, grad: torch.dtype | None = None) -> float:
        """Return the bytes per parameter of a large tensor, including a gradient of type `grad`."""
        state = sum(self.nbytes(BLOCK).values()) / BLOCK
        return state + (grad.itemsize if grad is not None else 0)


def rest_dtype(weight: torch.dtype) -> torch.dtype | None:
    """Return the type of the rest of the master, by the type of the weight; None for fp32."""
    return _REST[weight][1] if weight in _REST else None


def num_blocks(numel: int) -> int:
    """Return the number of bases for `numel` elements."""
    return -(-numel // BLOCK)


# Master weights.


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a finite fp32 master into a bf16 weight and a signed 16-bit remainder, without loss.

    The weight is rounded to nearest with ties away from zero. With ties to even, half of the ties
    would leave a remainder of +32768, which does not fit into 16 bits.
    """
    bits = _bits(master)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master of a bf16 weight and its remainder."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + low.to(torch.int32)).view(torch.float32)


def read_master(weight: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 master of a weight in any format."""
    if weight.dtype == torch.bfloat16 and rest is not None:
        return join(weight, rest)
    return weight if rest is None else rest


def store_master(
    master: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight of type `dtype` and the rest that together store an fp32 master."""
    if dtype == torch.bfloat16:
        return split(master)
    return master.to(dtype), master if dtype == torch.float16 else None


def fresh_rest(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the rest for a master that equals the weight; None for fp32."""
    if weight.dtype == torch.bfloat16:
        return torch.zeros(weight.shape, dtype=torch.int16, device=weight.device)
    return weight.detach().float() if weight.dtype == torch.float16 else None


# Moments.


def draw_bits(key: int, first_index: int, count: int, device: torch.device) -> torch.Tensor:
    """Return 32 random bits per element as int64, which depend only on the key and the index."""
    index = torch.arange(first_index, first_index + count, dtype=torch.int64, device=device)
    key0 = (key & _MASK32) ^ (((index >> 32) * 0x9E3779B1) & _MASK32)
    x = (index & _MASK32) ^ key0
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = (((x ^ (x >> 15)) + (key >> 32)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def round_bf16(value: torch.Tensor, random16: torch.Tensor) -> torch.Tensor:
    """Round to bf16 stochastically: up or down with probabilities that preserve the mean."""
    bits = _bits(value)
    top = ((bits & _MAGNITUDE) + random16.to(torch.int32)) >> 16
    top = top.clamp(max=0x7F7F)
    return ((bits & _SIGN) >> 16 | top).to(torch.int16).view(torch.bfloat16)


def encode_first(value: torch.Tensor, random16: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode fp32 as a sign and 7 bits per element, and a base per block."""
    bits, place, base = _onto_grid(value, random16, codes=127)
    unit = ((base + 1) << _GRID_SHIFT).view(torch.float32) * 2.0**-16
    dart = random16.to(torch.float32) * _spread(unit, value.numel())
    low = ((bits & _MAGNITUDE).view(torch.float32) > dart).to(torch.int32)
    above = place - _spread(base, value.numel())
    size = torch.where(above > 0, above, low)
    code = ((bits & _SIGN) >> 24 & 0x80) | size
    return code.to(torch.uint8), base.to(torch.int16)


def encode_second(value: torch.Tensor, random16: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode non-negative fp32 as 8 bits per element and a base per block. Only zero becomes 0."""
    bits, place, base = _onto_grid(value, random16, codes=255)
    size = (place - _spread(base, value.numel())).clamp(min=1)
    return torch.where(bits == 0, 0, size).to(torch.uint8), base.to(torch.int16)


def decode_first(code: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Decode codes of `encode_first` to fp32."""
    wide = code.to(torch.int32)
    magnitude = _off_grid(wide & 0x7F, base)
    return torch.where(wide >= 0x80, -magnitude, magnitude)


def decode_second(code: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Decode codes of `encode_second` to fp32."""
    return _off_grid(code.to(torch.int32), base)


def read_moment(state: Mapping[str, torch.Tensor], name: str, *, second: bool) -> torch.Tensor:
    """Return the moment `name` of a state in any format as flat fp32."""
    if f"{name}_code" not in state:
        return state[name].reshape(-1).float()
    decode = decode_second if second else decode_first
    return decode(state[f"{name}_code"].reshape(-1), state[f"{name}_base"])


def write_moment(
    value: torch.Tensor, name: str, moments: Moments, *, second: bool
) -> dict[str, torch.Tensor]:
    """Return the state entries for an fp32 moment of any shape, rounded to nearest."""
    if moments != "int8":
        return {name: value.to(_MOMENT_DTYPE[moments]).clone()}
    encode = encode_second if second else encode_first
    halfway = torch.full((value.numel(),), 0x8000, dtype=torch.int64, device=value.device)
    code, base = encode(value.reshape(-1).float(), halfway)
    return {f"{name}_code": code.view(value.shape), f"{name}_base": base}


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.int32)


def _spread(per_block: torch.Tensor, numel: int) -> torch.Tensor:
    return per_block.repeat_interleave(BLOCK)[:numel]


def _onto_grid(
    value: torch.Tensor, random16: torch.Tensor, *, codes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bits and the grid index of each element, and the base of each block."""
    bits = _bits(value)
    draw = random16.to(torch.int32) << (_GRID_SHIFT - 16)
    place = (((bits & _MAGNITUDE) + draw) >> _GRID_SHIFT).clamp(max=_GRID_TOP)
    padded = torch.zeros(num_blocks(value.numel()) * BLOCK, dtype=torch.int32, device=value.device)
    padded[: value.numel()] = place
    base = (padded.view(-1, BLOCK).amax(dim=1) - codes).clamp(min=0)
    return bits, place, base


def _off_grid(size: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    place = size + _spread(base.to(torch.int32), size.numel())
    return torch.where(size == 0, 0, place << _GRID_SHIFT).view(torch.float32)
