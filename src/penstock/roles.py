"""What a block's bytes are for, and how many a parameter takes in each format. Room: decide."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from penstock.units import round_up

Dtype = Literal["bf16", "fp16"]
Moments = Literal["fp32", "bf16", "int8"]

SCALE_BLOCK = 256
"""Elements that share one base in an int8 moment, as the sweep stores it."""

BASE_NBYTES = 2
"""One int16 base."""

TENSOR_ALIGNMENT = 256
"""Elements. A tensor starts at a multiple in its flat buffer, so that its bytes start at a multiple
of 256 in every role, int8 included, and no base spans two tensors."""

SWEEP_LEAF = 4096
"""Elements. The sweep may cut a tensor at multiples of this, counted from the tensor's start."""

EXTENT = 4096
"""Bytes. Each role of each block starts on a page, which is also a disk's block."""


class Role(StrEnum):
    """What one flat buffer of a block holds."""

    WEIGHT = "weight"
    """What the GPU computes with: 16 bit, and for bf16 the high half of the fp32 master."""

    MASTER = "master"
    """For bf16 the low half of the fp32 master; for fp16 the whole of it."""

    FIRST = "first"
    """First moment."""

    SECOND = "second"
    """Second moment."""

    GRADIENT = "gradient"
    """From backward until the sweep that uses it up."""

    INPUT = "input"
    """The block's input, from forward until backward recomputes from it."""


STATE = (Role.MASTER, Role.FIRST, Role.SECOND)
"""What only the sweep touches."""

TRAINED = (Role.WEIGHT, *STATE, Role.GRADIENT)
"""What rests for a trainable parameter between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """How each role is stored: the bytes a parameter takes."""

    dtype: Dtype = "bf16"
    """What the GPU computes in."""

    moments: Moments = "fp32"
    """How both moments rest."""

    wide_gradient: bool = False
    """Whether the gradient rests in fp32: it does where something is still to be added to it."""

    def nbytes(self, role: Role, elements: int) -> int:
        """Bytes of `elements` elements, without the padding of their home."""
        if role in (Role.FIRST, Role.SECOND) and self.moments == "int8":
            return elements + BASE_NBYTES * (round_up(elements, SCALE_BLOCK) // SCALE_BLOCK)
        return elements * self._width(role)

    def at_rest(self, role: Role, elements: int) -> int:
        """What a home must have for them: whole pages."""
        return round_up(self.nbytes(role, elements), EXTENT)

    def _width(self, role: Role) -> int:
        match role:
            case Role.MASTER:
                return 2 if self.dtype == "bf16" else 4
            case Role.FIRST | Role.SECOND:
                return 4 if self.moments == "fp32" else 2
            case Role.GRADIENT:
                return 4 if self.wide_gradient else 2
            case _:
                return 2

    @property
    def per_parameter(self) -> float:
        """Bytes of one trainable parameter, all roles together: 14 in exact mode."""
        return sum(self.nbytes(role, SCALE_BLOCK) for role in TRAINED) / SCALE_BLOCK
