"""NEFTune: uniform noise on the output of the token embedding during training.

The noise is `alpha / sqrt(tokens * width)` times uniform numbers from -1 to 1, where `tokens` is
the number of tokens of the document and `width` that of the embedding
(https://arxiv.org/abs/2310.05914). As in transformers, it is added to what the module that
`get_input_embeddings()` returns computes, before the model scales it or adds positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import UnsupportedModelError


def document_scales(positions: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return one over the square root of the length of each token's document, in fp32.

    Args:
        positions: Position of each token, `[rows, tokens]`; documents start at 0.
        counts: Whether each token counts; padding does not.
    """
    starts = positions == 0
    starts[:, 0] = True  # also of a row that begins inside a document
    document = starts.cumsum(1) - 1
    lengths = torch.zeros_like(document).scatter_add_(1, document, counts.long())
    # In fp64 and rounded once: the same bits on every CPU.
    return lengths.gather(1, document).clamp(min=1).double().sqrt().reciprocal().float()


class _Draw(NamedTuple):
    """The noise of one micro-batch."""

    key: int
    scales: torch.Tensor


class EmbeddingNoise:
    """Adds noise to the output of a model's token embedding, inside of `added`.

    `base` is the part of the model that calls the embedding and the layers.
    """

    def __init__(self, model: nn.Module, base: nn.Module, alpha: float) -> None:
        self._model, self._alpha = type(model).__name__, alpha
        self._draw: _Draw | None = None
        self._calls = 0
        try:
            table: Any = model.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            table = None
        if not isinstance(table, nn.Module):
            raise self._refusal("it has no module that embeds tokens")
        table.register_forward_hook(self._add)
        # Probes may have to run the model a second time to see how it calls its layers.
        base.register_forward_pre_hook(self._start)

    @contextlib.contextmanager
    def added(self, key: int, scales: torch.Tensor) -> Iterator[None]:
        """Add the noise that belongs to a key, in a block that runs the model up to its layers.

        Args:
            key: Decides the random numbers. Equal keys give equal noise on the same device.
            scales: What `document_scales` returns, on the device of the model.
        """
        self._draw, self._calls = _Draw(key, scales), 0
        try:
            yield
        finally:
            self._draw = None
        if self._calls != 1:
            raise self._refusal(f"its token embedding ran {self._calls} times for one batch")

    def _start(self, _module: nn.Module, _args: Any) -> None:
        self._calls = 0

    def _add(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._draw is None:
            return None
        key, scales = self._draw
        self._calls += 1
        if output.dim() != 3 or output.shape[:2] != scales.shape:
            raise self._refusal(
                f"its token embedding has an output of shape {tuple(output.shape)} for "
                f"{tuple(scales.shape)} tokens"
            )
        with torch.no_grad():
            # A generator of its own: dropout draws the same numbers with and without noise.
            drawn = torch.Generator(output.device).manual_seed(key)
            noise = torch.empty_like(output).uniform_(-1.0, 1.0, generator=drawn)
            noise *= (self._alpha / math.sqrt(output.shape[2])) * scales[:, :, None]
        return output + noise

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"neftune_noise_alpha is {self._alpha:g}, but noise cannot be added to the embedding "
            f"of {self._model}: {reason}. Leave the option out"
        )
