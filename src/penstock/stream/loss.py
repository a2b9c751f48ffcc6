"""The loss over the head, a chunk of tokens at a time. Room: move.

Logits of the whole batch never exist: each chunk's are made, judged, differentiated and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch.nn import functional

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


class ChunkedLoss:
    """Adds up the loss, and with `scale` also differentiates."""

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        chunk: int,
        function: LossFunction | None = None,
    ) -> None:
        self._logits, self._chunk, self._function = logits, chunk, function

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum over trained tokens, in fp64."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.no_grad():
            for rows in self._chunks(hidden):
                total += self._sum(hidden[rows], targets[rows]).double()
        return total

    def backward(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, items: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """That sum, and the gradient of `scale * sum / items` by the hidden states. Gradients of
        weights go where their hooks put them."""
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        back = torch.zeros_like(hidden)
        for rows in self._chunks(hidden):
            x = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                summed = self._sum(x, targets[rows])
                loss = summed / items
            (loss * scale if scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            back[rows] = x.grad
            total += summed.detach().double()
        return total, back

    def _chunks(self, hidden: torch.Tensor) -> Iterator[slice]:
        for low in range(0, hidden.shape[0], self._chunk):
            yield slice(low, low + self._chunk)

    def _sum(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._logits(rows).float()
        if self._function is None:
            return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        kept = targets != IGNORED
        picked = targets.clamp(min=0)[:, None]
        log_probs = logits.log_softmax(dim=-1).gather(1, picked)[:, 0]
        return self._function(log_probs[kept], targets[kept])
