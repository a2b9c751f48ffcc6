"""The layout of quantized weights: 4-bit codes in blocks of 64, and the scales of the blocks.

It is that of bitsandbytes with double quantization: every weight is a 4-bit code, an index into a
table of 16 values, times the scale of its block. The scale of a block is an 8-bit code, times the
scale of its group of 256 blocks, plus the mean of all scales of the tensor. That takes 0.516 bytes
per weight. `penstock.model.quantize` computes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.units import round_up

Quantization = Literal["nf4", "int4"]
"""What the 16 codes mean: `nf4` are the quantiles of a normal distribution, as QLoRA defines them;
`int4` are the whole numbers from -7 to 7, divided by 7."""

BLOCK = 64
"""Number of weights that share a scale."""

GROUP = 256
"""Number of blocks whose scales share a scale."""

ALIGNMENT = 16
"""Alignment in bytes of the parts of a packed tensor, and of its end: kernels load 16 bytes at a
time, and the end is a whole number of weights of any type."""


CHUNK = 1 << 24
"""Maximum number of weights that are dequantized at a time: a whole number of groups of blocks."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the parts of one quantized tensor are in its bytes.

    The codes come first, two in a byte with the first weight in the upper half. Then follow the
    fp32 scales of the groups, the fp32 mean, and the 8-bit codes of the scales of the blocks.
    """

    elements: int
    """Number of weights."""

    @property
    def blocks(self) -> int:
        """Number of blocks; the last may have fewer weights."""
        return -(-self.elements // BLOCK)

    @property
    def groups(self) -> int:
        """Number of groups of blocks; the last may have fewer blocks."""
        return -(-self.blocks // GROUP)

    @property
    def codes(self) -> slice:
        """The bytes of the codes."""
        return slice(0, -(-self.elements // 2))

    @property
    def group_scales(self) -> slice:
        """The bytes of the scales of the groups."""
        start = round_up(self.codes.stop, ALIGNMENT)
        return slice(start, start + 4 * self.groups)

    @property
    def mean(self) -> slice:
        """The bytes of the mean of all scales."""
        start: int = self.group_scales.stop
        return slice(start, start + 4)

    @property
    def scale_codes(self) -> slice:
        """The bytes of the codes of the scales of the blocks."""
        start: int = self.mean.stop
        return slice(start, start + self.blocks)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return round_up(self.scale_codes.stop, ALIGNMENT)


def scratch_nbytes(elements: int) -> int:
    """Return the bytes of scratch memory that a tensor of so many weights is dequantized with."""
    return sum(scratch_sizes(PackedLayout(min(elements, CHUNK)).blocks))


def scratch_sizes(blocks: int) -> tuple[int, int, int, int]:
    """Return the bytes of scratch memory for so many blocks, by what they hold.

    They are the fp32 scales, the codes of the scales as 32-bit indices, the codes as 32-bit
    indices, two in each, and the fp32 weights. The scales come first, because the compiler would
    copy them if they did not start at a multiple of 16 bytes.
    """
    return 4 * blocks, 4 * blocks, 4 * blocks * BLOCK // 2, 4 * blocks * BLOCK
