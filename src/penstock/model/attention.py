"""Attention within documents, without a mask. Room: move.

Packed rows hold several documents. A mask over a context of 131,072 would take 17 GB; here each
document is a causal attention of its own, and a sliding window is cut into bands; or, where the
workload says so, a variable-length kernel does all of it in one call. It is registered with
transformers under the name `penstock`, for which transformers makes no masks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock.model.varlen_attention import Cuts, attend_packed

NAME = "penstock"

Bounds = Sequence[Sequence[int]]
"""Per row, where documents begin, and the row's length."""

Documents = Bounds | Cuts
"""The same, for one call per document or for one call in all."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.bounds: Documents | None = None  # in each thread's own: compiled code looks there


_current = _Current()


@contextlib.contextmanager
def documents(bounds: Documents | None) -> Iterator[None]:
    """Attention of this thread keeps to these documents; None: every row is one."""
    before = _current.bounds
    _current.bounds = bounds
    try:
        yield
    finally:
        _current.bounds = before


def find_documents(position_ids: torch.Tensor) -> Bounds | None:
    """Documents begin where positions are 0. None if each row is one document."""
    length = position_ids.shape[1]
    starts = [(row[1:] == 0).nonzero()[:, 0] + 1 for row in position_ids]
    rows = [[0, *row.tolist(), length] for row in starts]
    return None if all(len(row) == 2 for row in rows) else rows


def register() -> None:
    """Make the name known to transformers."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    interface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; tensors are [rows, heads, tokens, head size]."""
    assert attention_mask is None, "transformers made a mask for attention that needs none"
    one = _Attention(module, scaling, dropout, sliding_window, softcap)
    bounds = _current.bounds
    if bounds is None:
        return one(query, key, value), None
    if isinstance(bounds, Cuts):
        assert softcap is None, "there is no kernel of that kind with capped scores"
        assert not dropout, "there is no kernel of that kind with dropout"
        window = sliding_window
        return attend_packed(query, key, value, bounds, scale=scaling, window=window), None
    rows = []
    for row, marks in enumerate(bounds):
        parts = [
            one(*(t[row : row + 1, :, low:high] for t in (query, key, value)))
            for low, high in itertools.pairwise(marks)
        ]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows), None


class _Attention:
    """Causal attention over one document, or over rows that are one each."""

    def __init__(
        self,
        module: torch.nn.Module,
        scaling: float | None,
        dropout: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self.module, self.scaling, self.dropout = module, scaling, dropout
        self.window, self.softcap = window, softcap

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        if self.softcap is not None:
            return self._bands(query, key, value, self._by_hand)
        if self.window is None or self.window >= length:
            return self._whole(query, key, value, None)
        return self._bands(query, key, value, self._whole)

    def _whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        call: Any = sdpa_attention_forward
        found: torch.Tensor = call(
            self.module,
            query,
            key,
            value,
            mask,
            dropout=self.dropout,
            scaling=self.scaling,
            is_causal=mask is None,
        )[0]
        return found

    def _by_hand(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """With capped scores, for which there is no fused kernel."""
        assert mask is not None
        assert self.softcap is not None
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scale = self.scaling if self.scaling is not None else query.shape[-1] ** -0.5
        scores = torch.matmul(query, key.transpose(2, 3)) * scale
        scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        weights = torch.nn.functional.dropout(weights, self.dropout)
        return torch.matmul(weights, value).transpose(1, 2).contiguous()

    def _bands(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, one: Any
    ) -> torch.Tensor:
        """A band of queries sees its own keys and those one window back."""
        length = query.shape[2]
        window = min(self.window or length, length)
        band = min(window, BAND)
        parts = []
        for low in range(0, length, band):
            high, first = min(low + band, length), max(0, low - window + 1)
            rows = torch.arange(low, high, device=query.device)[:, None]
            columns = torch.arange(first, high, device=query.device)[None, :]
            mask = (columns <= rows) & (columns > rows - window)
            keys, values = key[:, :, first:high], value[:, :, first:high]
            parts.append(one(query[:, :, low:high], keys, values, mask[None, None]))
        return torch.cat(parts, dim=1)


BAND = 1024
"""Queries of one band: with a window of 4,096 its mask is 5 MiB."""
