"""The matrix with which a language model predicts tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def output_weight(model: nn.Module) -> Any:
    """Return the matrix that makes logits of a model's outputs; None if it has no such matrix.

    A model for classification has none: only the caller's own code can compute its loss.
    """
    table = model.get_output_embeddings()  # type: ignore[operator]
    return getattr(table, "weight", None)
