"""Inputs and exact results for the decode kernel, and fixes for Triton's interpreter.

Without a GPU, the kernel runs in the interpreter. That needs a process of its own, which
`test_decode_attention.py` starts, because Triton decides at import whether it compiles or
interprets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kv import decode_attention

LAYERS, LAYER = 3, 1
SCALE = 0.2
PAD = 3
"""Number of tokens between one row and the next that belong to neither."""


@dataclass(frozen=True)
class Case:
    """Queries, and rows in the cache's layout with NaN wherever nothing may be read."""

    data: torch.Tensor
    """[tokens, layers, 2, shared heads, head size]"""
    query: torch.Tensor
    starts: list[int]
    lengths: list[int]

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as attention is given them: [1, heads, tokens, head size]."""
        keys, values = self.data[:, LAYER].unbind(1)
        return keys[None].transpose(1, 2), values[None].transpose(1, 2)

    def attend(self, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        device = self.data.device
        starts, ends = (torch.tensor(each, device=device) for each in (self.starts, self.lengths))
        spots = decode_attention.RowSpans(
            starts, ends, decode_attention.length_bound(max(self.lengths))
        )
        return decode_attention.attend(self.query, *self.views, spots, SCALE, window, softcap)

    def exact(self, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        """Compute attention by its definition, in double precision."""
        rows, heads, _, head = self.query.shape
        group = heads // self.data.shape[3]
        out = torch.zeros(rows, 1, heads, head, dtype=torch.float64)
        held, query = self.data[:, LAYER].cpu().double(), self.query.cpu().double()
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            if length == 0:
                continue
            first = 0 if window is None else max(0, length - window)
            part = held[start + first : start + length].repeat_interleave(group, dim=2)
            keys, values = part.unbind(1)
            scores = torch.einsum("thd,hd->ht", keys, query[row, :, 0]) * SCALE
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[row, 0] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
        return out


def make_case(
    lengths: Sequence[int], *, heads: int = 4, shared: int = 2, head: int = 64,
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
) -> Case:  # fmt: skip
    """Make a case whose rows follow each other in memory, the last row first."""
    drawn = torch.Generator().manual_seed(17)
    starts, at = [0] * len(lengths), 0
    for row in reversed(range(len(lengths))):
        starts[row], at = at, at + lengths[row] + PAD
    data = torch.full((at, LAYERS, 2, shared, head), float("nan"))
    for start, length in zip(starts, lengths, strict=True):
        part = torch.randn(length, 2, shared, head, generator=drawn)
        data[start : start + length, LAYER] = part
    query = torch.randn(len(lengths), heads, 1, head, generator=drawn)
    return Case(data.to(device, dtype), query.to(device, dtype), starts, list(lengths))


@pytest.fixture
def fixed_interpreter(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Fix two bugs of Triton's interpreter, and return the pointers and masks of all loads.

    The interpreter of Triton 3.6 multiplies the bits of bf16 numbers, and converts an array of one
    number to a number implicitly, which numpy no longer allows.
    """
    from triton.runtime import interpreter

    seen: list[tuple[Any, Any]] = []
    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    dot, load = builder.create_dot, builder.create_masked_load

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide(handle: Any) -> Any:
        if str(handle.dtype) != "bf16":
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def watched(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        seen.append((pointers.data, mask.data))
        return load(self, pointers, mask, *rest, **options)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(builder, "create_dot", multiplied)
    monkeypatch.setattr(builder, "create_masked_load", watched)
    return seen
