"""Rotary embeddings that depend on the length of a sequence, computed document by document.

With `longrope` (Phi 3 and 4), transformers uses one set of frequencies for sequences up to the
length that the model was first trained with, and another for longer ones. It decides by the largest
position in a batch. In a batch of several documents, one long document would change the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Tables = tuple[torch.Tensor, ...]
"""Cosines and sines, `[rows, tokens, dimensions]`."""


def choose_frequencies_by_document(model: nn.Module) -> nn.Module:
    """Make the rotary embeddings of a model choose frequencies by the length of each document."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if types == "longrope" or (isinstance(types, dict) and "longrope" in types.values()):
            module.forward = _by_document(module, module.forward)
    return model


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Return the length of each token's document, of positions that start at 0 with a document.

    A row that continues a sequence has all tokens before it in the length.
    """
    length = positions.shape[-1]
    index = torch.arange(length, device=positions.device).expand_as(positions)
    starts = torch.where(positions == 0, index, length)
    # The first start after each token: a running minimum from the end of the row.
    following = starts.roll(-1, -1)
    following[..., -1] = length
    ends = following.flip(-1).cummin(-1).values.flip(-1)
    return ends - index + positions


def shortest_switch(config: Any) -> int | None:
    """Return the length from which on a model of this config rotates with other frequencies.

    None for models that rotate sequences of all lengths with the same ones.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    lengths = [
        int(p["original_max_position_embeddings"])
        for p in each
        if p.get("rope_type") == "longrope" and p.get("original_max_position_embeddings")
    ]
    return min(lengths, default=None)


def _by_document(module: nn.Module, original: Callable[..., Tables]) -> Callable[..., Tables]:
    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: Any = None) -> Tables:
        # Only the embeddings of models with several types of layers take this argument.
        kind = () if layer_type is None else (layer_type,)
        limit = _longest_short_document(module, layer_type)
        if limit is None:
            return original(x, position_ids, *kind)
        is_long = document_lengths(position_ids) > limit
        # Each call sees the positions of one kind only, and chooses the frequencies of that kind.
        short = original(x, torch.where(is_long, 0, position_ids), *kind)
        long = original(x, torch.where(is_long, position_ids, 0), *kind)
        chosen = is_long[..., None]
        return tuple(torch.where(chosen, a, b) for a, b in zip(long, short, strict=True))

    return forward


def _longest_short_document(module: Any, layer_type: str | None) -> int | None:
    """Return the length up to which a document is short; None for other rotary embeddings."""
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    if parameters["rope_type"] != "longrope":
        return None
    return int(parameters["original_max_position_embeddings"])
