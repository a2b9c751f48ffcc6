"""The auxiliary loss of a mixture-of-experts model, which keeps the load of experts balanced.

transformers adds it to the loss of a model whose config has `output_router_logits`. For the router
logits of all layers together, it is `coefficient * experts * sum(share * probability)` over the
experts: the share of rows that chose an expert, and its mean probability, both over the rows of all
layers. A share has no gradient. So a layer's backward pass needs the shares, one number per expert,
and not the logits of other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import UnsupportedModelError

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The auxiliary loss of a model."""

    coefficient: float
    """Factor of the loss."""
    top_k: int
    """Number of experts that each token chooses."""

    @classmethod
    def of(cls, config: Any) -> RouterLoss | None:
        """Return the auxiliary loss that a config asks for, or None.

        Raises UnsupportedModelError if it asks for one that Penstock does not know.
        """
        if not getattr(config, "output_router_logits", False):
            return None
        names = [name for name in _COEFFICIENTS if hasattr(config, name)]
        top_k = getattr(config, "num_experts_per_tok", None)
        if not names or not isinstance(top_k, int):
            raise UnsupportedModelError(
                f"output_router_logits is on, but a config of type {config.model_type!r} has no "
                f"coefficient or no number of experts per token that Penstock knows; set it to "
                f"false with --model-config output_router_logits=false"
            )
        return cls(float(getattr(config, names[0])), top_k)


def head_options(config: Any) -> dict[str, bool]:
    """Return options with which a model runs its head alone, where there are no router logits."""
    return {"output_router_logits": False} if getattr(config, "output_router_logits", False) else {}


class RouterSums:
    """What the routers of all layers did with one micro-batch, as far as the loss needs it."""

    def __init__(self, loss: RouterLoss, mask: torch.Tensor | None) -> None:
        self._loss, self._mask = loss, mask
        self._chosen: torch.Tensor | None = None
        """Number of rows that chose each expert, over all layers so far."""
        self._probability: torch.Tensor | None = None
        """Sum of the probability of each expert, over all layers so far."""
        self._layers = 0
        self._tokens = 0

    def add(self, logits: torch.Tensor) -> None:
        """Add the logits of one layer's router, `[tokens, experts]`."""
        with torch.no_grad():
            probabilities = logits.softmax(dim=-1)
            chosen = probabilities.topk(self._loss.top_k, dim=-1).indices
            counts = count_rows(chosen, logits.shape[-1], self._mask)
            sums = self._masked_sum(probabilities)
        self._chosen = counts if self._chosen is None else self._chosen + counts
        self._probability = sums if self._probability is None else self._probability + sums
        self._layers += 1
        self._tokens = logits.shape[0]

    def add_all(self, logits: Sequence[torch.Tensor]) -> None:
        """Add the logits of all routers of a layer."""
        for each in logits:
            self.add(each)

    def loss(self) -> torch.Tensor:
        """Return the loss of the micro-batch, with its coefficient."""
        assert self._probability is not None
        rows = self._rows()
        return self._weights(rows) @ (self._probability / rows)

    def logit_gradients(
        self, logits: Sequence[torch.Tensor], factor: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits of all routers of a layer, each with its `logit_gradient`."""
        return [(each, self.logit_gradient(each, factor)) for each in logits]

    def logit_gradient(self, logits: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `factor` times the loss, for one layer's logits."""
        rows = self._rows()
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            term = self._weights(rows) @ (self._masked_sum(leaf.softmax(dim=-1)) / rows)
            (gradient,) = torch.autograd.grad(term * factor, leaf)
        return gradient

    def _weights(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the mean probability of each expert is multiplied with."""
        assert self._chosen is not None
        return self._chosen.float() / rows * (self._loss.coefficient * self._chosen.shape[0])

    def _rows(self) -> torch.Tensor:
        """Return the number of rows of all layers that count."""
        assert self._chosen is not None
        if self._mask is None:
            total = self._chosen.new_tensor(self._tokens * self._layers)
        else:
            total = self._mask.sum() * self._layers
        return total.float()

    def _masked_sum(self, probabilities: torch.Tensor) -> torch.Tensor:
        values = probabilities.float()
        if self._mask is not None:
            values = values * self._mask.reshape(-1, 1)
        return values.sum(dim=0)


def count_rows(chosen: torch.Tensor, experts: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Return how many of the rows `[rows, choices]` that count chose each expert.

    It sorts, because adding to counters in memory has no deterministic kernel on a GPU.
    """
    if mask is not None:
        chosen = torch.where(mask.reshape(-1, 1), chosen, experts)
    numbers = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen.flatten().sort().values, numbers, right=True)
    return sizes_of(ends)


def sizes_of(ends: torch.Tensor) -> torch.Tensor:
    """Return the sizes of consecutive groups from their ends."""
    return torch.diff(ends, prepend=ends.new_zeros(1))
