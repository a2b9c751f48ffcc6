"""Read what the attention masks say that a multimodal model makes for its decoder.

The engine's attention takes no masks. It knows documents, padding, sliding windows, and spans of
tokens that see each other in both directions, such as the tokens of an image in Gemma 3. A model
that makes masks itself gets a function from transformers' registry that records them. Here they are
turned into spans; a mask that shows anything else is refused, so that no model is computed with
another mask than its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from penstock.errors import UnsupportedModelError
from penstock.model.document_attention import Bounds

RECORDED = "penstock-recorded"
"""Name of the attention of a decoder whose masks are recorded. It never computes."""

WINDOWED = "sliding_attention"
"""transformers' name of layers with a sliding window."""

KINDS = ("full_attention", WINDOWED)

Spans = Sequence[Sequence[tuple[int, int]]]
"""For each row, the first token of each span, and the one after its last."""


class ModelMask(NamedTuple):
    """An attention mask as a model asks for it."""

    visible: torch.Tensor
    """`[rows, 1, queries, keys]`: whether a query sees a key, without regard to padding."""
    tokens: torch.Tensor | None
    """`[rows, keys]`: False for padding; None if there is none."""


def register_recorded_masks() -> None:
    """Register the function that records masks with transformers."""
    from transformers import AttentionMaskInterface

    interface: Any = AttentionMaskInterface
    interface.register(RECORDED, _record)


def _record(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> ModelMask:
    from transformers.masking_utils import sdpa_mask

    make: Any = sdpa_mask
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return ModelMask(make(*args, attention_mask=None, **kwargs), attention_mask)


def tokens_of(given: Any) -> torch.Tensor | None:
    """Return the mask of padding in what a model passes to its decoder as an attention mask."""
    masks = _by_kind(given)
    if masks is None:
        return given  # type: ignore[no-any-return]
    return next((mask.tokens for mask in masks.values()), None)


def find_spans(given: Any, bounds: Bounds | None, window: int | None, name: str) -> Spans | None:
    """Return the spans that see each other in both directions; None if there are none.

    Args:
        given: What the model passes to its decoder as an attention mask.
        bounds: Where documents begin; None if each row is one document.
        window: Size of the sliding window of layers that have one.
        name: The model's name, for messages.

    Raises UnsupportedModelError if a mask shows more than documents, windows and spans.
    """
    masks = _by_kind(given)
    if not masks:
        return None
    first = next(iter(masks.values())).visible
    spans = [_spans_of_row(row[0]) for row in first]
    for kind, mask in masks.items():
        if kind not in KINDS:
            raise UnsupportedModelError(f"{name} makes masks for {kind} layers; {_SUPPORTED}")
        for row, visible in enumerate(mask.visible):
            marks = (0, visible.shape[-1]) if bounds is None else bounds[row]
            known = _expected(visible[0], marks, spans[row], window if kind == WINDOWED else None)
            if not torch.equal(known, visible[0]):
                raise UnsupportedModelError(
                    f"{name} makes an attention mask for its {kind} layers that Penstock's "
                    f"attention cannot compute, in row {row} of the batch; {_SUPPORTED}"
                )
    return spans if any(spans) else None


_SUPPORTED = (
    "supported are causal attention, documents, padding on either side of a row, sliding windows, "
    "and spans of tokens that see each other, such as those of an image"
)


def _by_kind(given: Any) -> Mapping[str, ModelMask] | None:
    """Return recorded masks by the kind of layer; None if nothing was recorded."""
    if isinstance(given, ModelMask):
        return {KINDS[0]: given}
    if not isinstance(given, Mapping):
        return None
    other = next((type(m).__name__ for m in given.values() if not isinstance(m, ModelMask)), None)
    if other is not None:
        raise UnsupportedModelError(
            f"the attention masks of a streamed model are made by the model itself; got {other}"
        )
    return given


def _spans_of_row(visible: torch.Tensor) -> list[tuple[int, int]]:
    """Return the spans of a row, from the last key that each query sees."""
    length = visible.shape[-1]
    numbers = torch.arange(length, device=visible.device)
    last = torch.where(visible, numbers, -1).amax(dim=1).tolist()
    spans, at = [], 0
    while at < length:
        end = max(last[at], at) + 1
        if end > at + 1:
            spans.append((at, end))
        at = end
    return spans


def _expected(
    like: torch.Tensor, bounds: Sequence[int], spans: Sequence[tuple[int, int]], window: int | None
) -> torch.Tensor:
    """Return the mask that the engine's attention computes with."""
    length = like.shape[-1]
    numbers = torch.arange(length, device=like.device)
    queries, keys = numbers[:, None], numbers[None, :]
    shown = keys <= queries
    if window is not None:
        shown &= keys > queries - window
    if len(bounds) > 2:
        document = torch.zeros_like(numbers)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            document[start:end] = number
        shown &= document[:, None] == document[None, :]
    for start, end in spans:
        shown[start:end, start:end] = True
    return shown
