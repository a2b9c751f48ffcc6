"""What the masks say that a multimodal model makes for its decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock.autograd.model_masks import ModelMask, find_spans, tokens_of
from penstock.errors import UnsupportedModelError


def mask(
    length: int,
    *spans: tuple[int, int],
    window: int | None = None,
    documents: Sequence[int] = (),
    tokens: torch.Tensor | None = None,
) -> ModelMask:
    """Return a mask of one row: causal, except where spans see each other."""
    shown = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        start = max((d for d in documents if d <= query), default=0)
        for key in range(start, query + 1):
            shown[query, key] = window is None or key > query - window
    for start, end in spans:
        shown[start:end, start:end] = True
    return ModelMask(shown[None, None], tokens)


def spans(given: Any, bounds: Any = None, window: int | None = None) -> Any:
    return find_spans(given, bounds, window, "a model")


def test_a_causal_mask_has_no_spans() -> None:
    assert spans(mask(6)) is None
    assert spans(None) is None
    assert spans({}) is None


def test_tokens_that_see_each_other_are_found() -> None:
    assert spans(mask(7, (0, 2), (3, 6))) == [[(0, 2), (3, 6)]]
    assert spans(mask(4, (2, 4))) == [[(2, 4)]]


def test_windows_apply_to_layers_that_have_one() -> None:
    kinds = {"full_attention": mask(6, (1, 3)), "sliding_attention": mask(6, (1, 3), window=2)}
    assert spans(kinds, window=2) == [[(1, 3)]]
    for window in (1, 3, None):
        with pytest.raises(UnsupportedModelError, match="for its sliding_attention layers"):
            spans(kinds, window=window)
    with pytest.raises(UnsupportedModelError, match="for its full_attention layers"):
        spans(mask(6, window=2), window=2)


def test_documents_do_not_see_each_other() -> None:
    given = mask(6, (4, 6), documents=[0, 3])
    assert spans(given, [(0, 3, 6)]) == [[(4, 6)]]
    for bounds in (None, [(0, 2, 6)], [(0, 6)]):
        with pytest.raises(UnsupportedModelError, match="in row 0 of the batch"):
            spans(given, bounds)
    with pytest.raises(UnsupportedModelError, match="cannot compute"):
        spans(mask(6), [(0, 3, 6)])


def test_each_row_has_its_own_spans() -> None:
    both = ModelMask(torch.cat([mask(4, (0, 2)).visible, mask(4).visible]), None)
    assert spans(both) == [[(0, 2)], []]


def test_kinds_of_layers_and_masks_that_are_not_known_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="makes masks for chunked_attention layers"):
        spans({"chunked_attention": mask(3)})
    with pytest.raises(UnsupportedModelError, match="made by the model itself; got Tensor"):
        spans({"full_attention": torch.ones(1, 1, 3, 3)})


def test_padding_is_kept_apart_from_what_a_mask_shows() -> None:
    padding = torch.tensor([[1, 1, 0]])
    assert tokens_of(padding) is padding
    assert tokens_of(mask(3, tokens=padding)) is padding
    assert tokens_of({"full_attention": mask(3, tokens=padding)}) is padding
    assert tokens_of(mask(3)) is None
