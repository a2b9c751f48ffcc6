"""The loss over the head, a chunk of tokens at a time. Room: move.

Logits of the whole batch never exist: each chunk's are made, judged, differentiated and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from penstock.engine.gradients import differentiate

IGNORED = -100
"""A label that is not trained, as Hugging Face has it."""


class LossFunction(Protocol):
    """The sum of losses over trained tokens, from the log-probability of each one's target."""

    def __call__(self, log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...


def next_targets(labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """What each token is to predict: the next one's label, unless a document begins there."""
    targets = torch.full_like(labels, IGNORED)
    following = torch.where(position_ids[:, 1:] == 0, IGNORED, labels[:, 1:])
    targets[:, :-1] = following
    return targets


class Into(NamedTuple):
    """What the head computes with, and who takes the gradients by it."""

    parameters: Mapping[str, torch.Tensor]
    add: Callable[[str, torch.Tensor], None]


class ChunkedLoss:
    """Adds up the loss, and differentiates."""

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        chunk: int,
        function: LossFunction | None = None,
        *,
        fused: bool = False,
    ) -> None:
        assert function is None or not fused
        self._logits, self._chunk, self._function, self._fused = logits, chunk, function, fused

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum over trained tokens, in fp64."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad():
            for rows in self._chunks(hidden):
                logits = self._logits(hidden[rows])
                total += self._judge(logits, targets[rows]).double()
        return total

    def backward(
        self, hidden: torch.Tensor, targets: torch.Tensor, into: Into, items: int, scale: float
    ) -> torch.Tensor:
        """That sum. The hidden states become the gradient of `scale * sum / items` by them."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for rows in self._chunks(hidden):
            x = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = self._logits(x)
                if self._fused:
                    out, gradient = logits, logits.detach()
                    summed = fused_loss(gradient, targets[rows], scale / items)
                else:
                    summed = self._sum(logits, targets[rows])
                    out, gradient = summed / items, None
                    out = out * scale if scale != 1.0 else out
            total += summed.detach().double()
            back = differentiate(out, gradient, x, into.parameters, into.add)
            assert back is not None
            hidden[rows] = back
        return total

    def _chunks(self, hidden: torch.Tensor) -> Iterator[slice]:
        for low in range(0, hidden.shape[0], self._chunk):
            yield slice(low, low + self._chunk)

    def _judge(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return fused_loss(logits, targets, None)
        return self._sum(logits, targets)

    def _sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if self._function is None:
            return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        kept = targets != IGNORED
        picked = targets.clamp(min=0)[:, None]
        log_probs = logits.log_softmax(dim=-1).gather(1, picked)[:, 0]
        return self._function(log_probs[kept], targets[kept])


def fused_loss(logits: torch.Tensor, targets: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The sum of losses of contiguous rows; with a scale, logits are overwritten by their gradient
    times it. Takes four bytes a row."""
    from penstock.engine.loss_kernels import cross_entropy_kernel

    assert logits.is_contiguous()
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    kernel: Any = cross_entropy_kernel
    kernel[(rows,)](
        *(logits, targets, losses, vocabulary, 0.0 if scale is None else scale),
        IGNORED=IGNORED,
        WRITE=scale is not None,
        BLOCK=8192,
        num_warps=16,
    )
    return losses.sum(dtype=torch.float64)
