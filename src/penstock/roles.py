"""Roles of a block's flat buffers, and the bytes each role takes per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from penstock.units import round_up

Dtype = Literal["bf16", "fp16"]
Moments = Literal["fp32", "bf16", "int8"]

SCALE_BLOCK = 256
"""Number of elements that share one base in an int8 moment."""

BASE_NBYTES = 2
"""Size of one int16 base in bytes."""

TENSOR_ALIGNMENT = 256
"""Alignment of a tensor in its flat buffer, in elements.

Its bytes then start at a multiple of 256 in every role, including int8, and no int8 base is shared
by two tensors."""

SWEEP_LEAF = 4096
"""Granularity of the optimizer sweep, in elements: it may split a tensor at multiples of this,
counted from the start of the tensor."""

EXTENT = 4096
"""Alignment of each role of each block, in bytes: one page, which is also a disk block."""


class Role(StrEnum):
    """Content of one flat buffer of a block."""

    WEIGHT = "weight"
    """The 16-bit weights that the GPU computes with: the fp32 master weights rounded to nearest."""

    MASTER = "master"
    """The part of the fp32 master weights that `WEIGHT` lacks.

    For bf16, the signed 16-bit remainder: the difference of the bit patterns of master and rounded
    weight (`penstock.optim.formats.split`). For fp16, the complete fp32 master weights. Segments of
    the sweep and checkpoints call it `rest`; the optimizers in `penstock.optim` store it as `low`
    (bf16) or `master` (fp16)."""

    FIRST = "first"
    """The optimizer's first moment."""

    SECOND = "second"
    """The optimizer's second moment."""

    GRADIENT = "gradient"
    """The gradient, from backward until the optimizer sweep consumes it."""

    ACTIVATION = "input"  # the value is in plan files
    """The saved block input, from forward until backward recomputes from it."""


STATE = (Role.MASTER, Role.FIRST, Role.SECOND)
"""Roles that only the optimizer sweep reads and writes."""

TRAINED = (Role.WEIGHT, *STATE, Role.GRADIENT)
"""Roles that a trainable parameter needs memory for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """Storage format of each role, which determines the bytes per parameter."""

    dtype: Dtype = "bf16"
    """Data type the GPU computes in."""

    moments: Moments = "fp32"
    """Storage format of both moments."""

    wide_gradient: bool = False
    """Whether the gradient is stored in fp32, as it must be while more is accumulated into it."""

    def nbytes(self, role: Role, elements: int) -> int:
        """Return the bytes of `elements` elements, without padding."""
        if role in (Role.FIRST, Role.SECOND) and self.moments == "int8":
            return elements + BASE_NBYTES * (round_up(elements, SCALE_BLOCK) // SCALE_BLOCK)
        return elements * self._width(role)

    def at_rest(self, role: Role, elements: int) -> int:
        """Return the bytes to reserve for `elements` elements: whole pages."""
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
        """Bytes per trainable parameter over all roles: 14 in exact mode."""
        return sum(self.nbytes(role, SCALE_BLOCK) for role in TRAINED) / SCALE_BLOCK
