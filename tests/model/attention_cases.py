"""Attention as it is defined, in fp64, and cases to compare kernels with it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from penstock.model import attention_launch
from penstock.model.attention_launch import Kernel, Layout, Tiles, choose_tiles


class Case(NamedTuple):
    """Documents, heads and options of one attention."""

    lengths: tuple[int, ...]
    heads: int = 2
    shared: int = 1
    size: int = 16
    window: int = 0
    cap: float = 0.0
    dtype: torch.dtype = torch.float16

    @property
    def scale(self) -> float:
        # Large enough scores for a cap to matter.
        return (3.0 if self.cap else 1.0) * self.size**-0.5

    @property
    def bounds(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def inputs(self, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
        """Return queries, keys, values and the output's gradient."""
        random = torch.Generator().manual_seed(seed)
        tokens = sum(self.lengths)
        return [
            torch.randn(tokens, heads, self.size, generator=random).to(device, self.dtype)
            for heads in (self.heads, self.shared, self.shared, self.heads)
        ]

    def layout(self, device: torch.device) -> Layout:
        spans = attention_launch.document_spans(self.bounds).to(device)
        return Layout(spans, self.scale, self.window, self.cap)

    def attend(
        self, inputs: list[torch.Tensor], tiles: Tiles | None = None, *, apart: bool = False,
        layout: Layout | None = None,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return output, log-sum-exps and gradients, as the kernels compute them.

        With `apart`, a kernel of its own computes the gradient of values. With a `layout`, programs
        may start in another order.
        """

        def choose(kernel: Kernel, *arguments: Any) -> Tiles | None:
            if tiles is None:
                return choose_tiles(kernel, *arguments)
            return tiles if apart or kernel != "value_gradient" else None

        query, key, value, grad = inputs
        layout = self.layout(query.device) if layout is None else layout
        out, sums = attention_launch.forward(query, key, value, layout, choose)
        gradients = attention_launch.backward(grad, query, key, value, out, sums, layout, choose)
        return [out, sums[:, : query.shape[0]], *gradients]

    def exact(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the same in fp64."""
        query, key, value, grad = (t.double().transpose(0, 1) for t in inputs)
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        group = self.heads // self.shared
        q, k, v = leaves[0], *(t.repeat_interleave(group, 0) for t in leaves[1:])
        scores = q @ k.mT * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        index = torch.arange(q.shape[1], device=q.device)
        document = torch.bucketize(index, index.new_tensor(self.bounds), right=True)
        distance = index[:, None] - index[None, :]
        visible = (distance >= 0) & (document[:, None] == document[None, :])
        if self.window:
            visible &= distance < self.window
        scores = scores.masked_fill(~visible, float("-inf"))
        out = scores.softmax(-1) @ v
        gradients = torch.autograd.grad(out, leaves, grad)
        transposed = (t.detach().transpose(0, 1) for t in (out, *gradients))
        first, *rest = transposed
        return [first, scores.logsumexp(-1).detach(), *rest]


def relative_errors(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    """Return errors relative to the whole result. A result may be zero: with a window of 1, for
    example, the output does not depend on queries and keys."""
    return [
        float((a.detach().double() - b).norm() / b.norm().clamp(min=1.0))
        for a, b in zip(found, wanted, strict=True)
    ]
