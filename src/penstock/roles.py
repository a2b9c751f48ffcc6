"""Roles of a block's flat buffers, and the bytes each role takes per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from penstock.units import round_up

Dtype = Literal["bf16", "fp16", "fp32"]
Moments = Literal["fp32", "bf16", "int8"]
OptimizerName = Literal["adamw", "lion", "sgd", "adafactor", "muon"]

SCALE_BLOCK = 256
"""Number of elements that share one base in an int8 moment."""

BASE_NBYTES = 2
"""Size of one int16 base in bytes."""

TENSOR_ALIGNMENT = 256
"""Alignment of a tensor in its flat buffer, in elements, if one rank owns the whole buffer.

Its bytes then start at a multiple of 256 in every role, including int8, and no int8 base is shared
by two tensors. In a buffer that several ranks share, tensors are aligned to `SWEEP_LEAF`, so that
a shard may begin at any multiple of it."""

SWEEP_LEAF = 4096
"""Granularity of the optimizer sweep, in elements: it may split a tensor at multiples of this,
counted from the start of the tensor."""

EXTENT = 4096
"""Alignment of each role of each block, in bytes: one page, which is also a disk block."""


class Role(StrEnum):
    """Content of one flat buffer of a block."""

    WEIGHT = "weight"
    """The weights that the GPU computes with: the fp32 master weights, rounded to nearest where the
    data type has 16 bits."""

    FROZEN = "frozen"
    """The frozen weights, if they are stored apart from the trained ones: an adapter is in HBM, and
    the weights that it adapts are not. Otherwise `WEIGHT` contains both."""

    MASTER = "master"
    """The part of the fp32 master weights that `WEIGHT` lacks.

    For bf16, the signed 16-bit remainder: the difference of the bit patterns of master and rounded
    weight (`penstock.optim.formats.split`). For fp16, the complete fp32 master weights. For fp32,
    the weight is the master weight, and no block has this role. Segments of the sweep and
    checkpoints call it `rest`; the optimizers in `penstock.optim` store it as `low` (bf16) or
    `master` (fp16)."""

    FIRST = "first"
    """The optimizer's first moment: an average of gradients, or the momentum. Adafactor has none,
    and neither has SGD without momentum."""

    SECOND = "second"
    """The optimizer's second moment: an average of squared gradients. Lion and SGD have none. Muon
    has one of the tensors that AdamW updates, and Adafactor has one of rows and columns
    (`second_moment_elements`)."""

    GRADIENT = "gradient"
    """The gradient, from backward until the optimizer sweep consumes it."""

    ACTIVATION = "input"  # the value is in plan files
    """The saved block input, from forward until backward recomputes from it."""

    ATTENTION = "attention"
    """What attention returned in the forward pass of a layer, until backward recomputes the layer
    and uses it instead of computing attention again."""


STATE = (Role.MASTER, Role.FIRST, Role.SECOND)
"""Roles that only the optimizer sweep reads and writes."""

PASSING = (Role.ACTIVATION, Role.ATTENTION)
"""Roles that exist from a block's forward pass to its backward pass."""

TRAINED = (Role.WEIGHT, *STATE, Role.GRADIENT)
"""Roles that a trainable parameter needs memory for."""

WEIGHTS = (Role.WEIGHT, Role.MASTER)
"""Roles that a sweep of the weights alone updates."""

MOMENTS = (Role.FIRST, Role.SECOND)
"""Roles that a sweep of the moments alone updates."""


class WeightFormat(NamedTuple):
    """How a weight and its fp32 master weight are stored, in bytes per parameter."""

    weight: int
    """Bytes of a weight. Activations and gradients have the same data type."""

    master: int
    """Bytes of `Role.MASTER`: the remainder if the master weight is split, 4 if it is stored
    separately, 0 if the weight is the master weight."""


WEIGHT_FORMATS: Mapping[Dtype, WeightFormat] = {
    "bf16": WeightFormat(weight=2, master=2),
    "fp16": WeightFormat(weight=2, master=4),
    "fp32": WeightFormat(weight=4, master=0),
}
"""The format of weights, by the data type that the GPU computes in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """Storage format of each role, which determines the bytes per parameter."""

    dtype: Dtype = "bf16"
    """Data type the GPU computes in."""

    moments: Moments = "fp32"
    """Storage format of both moments."""

    accumulates: bool = False
    """Whether more is added to a stored gradient, which is stored in fp32 then."""

    optimizer: OptimizerName = "adamw"
    """The optimizer, which decides which moments there are."""

    momentum: bool = False
    """Whether SGD stores its momentum."""

    @property
    def weight_format(self) -> WeightFormat:
        """The format of weights and master weights."""
        return WEIGHT_FORMATS[self.dtype]

    @property
    def wide_gradient(self) -> bool:
        """Whether the gradient is stored in fp32: the fp32 sum itself, not rounded to 16 bits."""
        return self.accumulates or self.weight_format.weight == 4

    def has(self, role: Role) -> bool:
        """Return whether a trainable parameter has this role at all."""
        match role:
            case Role.MASTER:
                return self.weight_format.master > 0
            case Role.FIRST if self.optimizer == "sgd":
                return self.momentum
            case Role.FIRST:
                return self.optimizer != "adafactor"
            case Role.SECOND:
                return self.optimizer not in ("lion", "sgd")
            case _:
                return True

    def nbytes(self, role: Role, elements: int) -> int:
        """Return the bytes of `elements` elements, without padding."""
        if not self.has(role):
            return 0
        if role in (Role.FIRST, Role.SECOND) and self.moments == "int8":
            return elements + BASE_NBYTES * (round_up(elements, SCALE_BLOCK) // SCALE_BLOCK)
        return elements * self._width(role)

    def at_rest(self, role: Role, elements: int) -> int:
        """Return the bytes to reserve for `elements` elements: whole pages."""
        return round_up(self.nbytes(role, elements), EXTENT)

    def _width(self, role: Role) -> int:
        match role:
            case Role.MASTER:
                return self.weight_format.master
            case Role.FIRST | Role.SECOND:
                return 4 if self.moments == "fp32" else 2
            case Role.GRADIENT if self.wide_gradient:
                return 4
            case _:
                return self.weight_format.weight

    @property
    def per_parameter(self) -> float:
        """Bytes per trainable parameter over all roles: 14 with AdamW in bf16 with fp32 moments.

        Muon and Adafactor need less: their second moments have fewer elements than the parameters.
        """
        return sum(self.nbytes(role, SCALE_BLOCK) for role in TRAINED) / SCALE_BLOCK
