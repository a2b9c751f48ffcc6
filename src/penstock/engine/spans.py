"""Bytes seen as elements of a role. Room: move."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.roles import SCALE_BLOCK, Formats, Role

_SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MOMENT = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def role_dtype(role: Role, formats: Formats) -> torch.dtype:
    """How one element of it is stored."""
    match role:
        case Role.MASTER:
            return torch.int16 if formats.dtype == "bf16" else torch.float32
        case Role.FIRST | Role.SECOND:
            return _MOMENT[formats.moments]
        case Role.GRADIENT if formats.wide_gradient:
            return torch.float32
        case _:
            return _SIXTEEN[formats.dtype]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `first` to `first + count` of one role of a block, wherever their bytes are.

    The elements come first; the bases of 8-bit moments follow them.
    """

    role: Role
    data: torch.Tensor
    """Bytes."""
    first: int
    count: int
    formats: Formats

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the block's buffer, by their place in it."""
        dtype = role_dtype(self.role, self.formats)
        low, high = start - self.first, stop - self.first
        assert 0 <= low <= high <= self.count, (self.role, self.first, self.count, start, stop)
        return self.data[low * dtype.itemsize : high * dtype.itemsize].view(dtype)

    def bases(self, start: int, stop: int) -> torch.Tensor | None:
        """With 8-bit moments, the bases of those elements."""
        if self.formats.moments != "int8" or self.role not in (Role.FIRST, Role.SECOND):
            return None
        assert (start - self.first) % SCALE_BLOCK == 0
        low = self.count + 2 * ((start - self.first) // SCALE_BLOCK)
        high = low + 2 * -(-(stop - start) // SCALE_BLOCK)
        return self.data[low:high].view(torch.int16)

    @property
    def nbytes(self) -> int:
        """What its elements take, bases included."""
        return self.formats.nbytes(self.role, self.count)
