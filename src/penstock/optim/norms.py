"""The result of a pass over gradients: sum of squares, norm, and the first non-finite element.

The passes themselves are `sweep.grad_stats` and `sweep.start(..., stats=True)` on the CPU and
`device_norms` on the GPU. They add squares without rounding, so that results of parts can be added.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from penstock import _native

_UNIT_BITS = 352
"""The exact sum counts units of 2^-352, the last bit of the smallest fp32 square as a double."""


@dataclass(frozen=True, slots=True)
class GradStats:
    """Result of one pass over gradients.

    Stats of parts add up exactly to the stats of the whole, so neither chunks nor threads nor their
    order can change a norm.
    """

    units: int
    """Exact sum of squares in units of 2^-352; meaningless if not `finite`."""
    max_abs: float
    """Largest absolute value; infinite or NaN if an element is."""
    first_bad: tuple[int, int] | None
    """Index of the tensor and of its element that is the first that is not finite."""

    @property
    def finite(self) -> bool:
        """Whether all elements are finite."""
        return self.first_bad is None

    @property
    def sum_squares(self) -> float:
        """Sum of squares, rounded once to nearest; NaN if an element is not finite."""
        return self.units / (1 << _UNIT_BITS) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """Euclidean norm."""
        return math.sqrt(self.sum_squares)

    def __add__(self, other: GradStats) -> GradStats:
        """Combine two results. `first_bad` is that of the first operand that has one."""
        return GradStats(
            self.units + other.units,
            max(self.max_abs, other.max_abs)
            if self.max_abs == self.max_abs and other.max_abs == other.max_abs
            else math.nan,
            self.first_bad if self.first_bad is not None else other.first_bad,
        )


def read_stats(job: _native.SweepJob) -> GradStats:
    """Return the stats of a finished native job."""
    units = sum(limb << (32 * i) for i, limb in enumerate(job.sum_squares_limbs))
    max_abs: float = struct.unpack("<f", struct.pack("<I", job.max_bits))[0]
    return GradStats(units, max_abs, job.bad_grad)


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor that clips `norm` to `max_norm`, as in torch's `clip_grad_norm_`."""
    return min(1.0, max_norm / (norm + 1e-6))
