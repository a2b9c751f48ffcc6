"""Attention within the documents of packed rows, without a mask.

Packed rows hold several documents, and a token must only see its own. A mask over a context of
131,072 tokens would take 17 GB. Where the workload asks for it, one call of Penstock's kernels
computes all documents of all rows (`penstock.model.varlen_attention`). Otherwise, each document is
a causal attention of its own, computed by PyTorch, and a sliding window is computed in bands of
queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from penstock.model.attention import (
    DOCUMENTS,
    AttentionOptions,
    attention_function,
    current_scope,
    register,
)
from penstock.model.varlen_attention import DocumentSpans, attend_packed

Bounds = Sequence[Sequence[int]]
"""For each row, where its documents begin, followed by the row's length."""


class PaddedRows(NamedTuple):
    """Rows that are one document each, with padding before some of them."""

    starts: Sequence[int]
    """For each row, its first token that counts. Attention returns zeros for those before it, as
    PyTorch's does with a mask that hides all keys from them."""

    length: int
    """Number of tokens of a row, padding included."""

    @property
    def bounds(self) -> Bounds:
        """Where documents begin, if the padding of a row is a document of its own."""
        return [[0, s, self.length] if s else [0, self.length] for s in self.starts]


class TwoWaySpans(NamedTuple):
    """Rows in which the tokens of an image see each other, also those after them."""

    bounds: Bounds
    """For each row, where its documents begin, followed by the row's length."""

    padding: Sequence[int]
    """For each row, how many tokens of padding it begins with, which are a document of their own.
    Attention returns zeros for them."""

    spans: Sequence[Sequence[tuple[int, int]]]
    """For each row, the first token of each image, and the one after its last."""


Documents = Bounds | PaddedRows | TwoWaySpans | DocumentSpans
"""Documents: for one call of PyTorch's attention each, or for one call of Penstock's for all."""

BAND = 1024
"""Number of queries per band. With a window of 4,096 tokens, a band's mask takes 5 MiB."""


def find_documents(position_ids: torch.Tensor) -> Bounds | None:
    """Find where documents begin. Return None if each row is one document.

    That is where a position does not follow the one before it, as in transformers.
    """
    length = position_ids.shape[1]
    starts = [(row[1:] != row[:-1] + 1).nonzero()[:, 0] + 1 for row in position_ids]
    rows = [[0, *row.tolist(), length] for row in starts]
    return None if all(len(row) == 2 for row in rows) else rows


def register_document_attention() -> None:
    """Register attention within documents with transformers."""
    register(DOCUMENTS, attend)


def _attend_documents(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend within the documents that `attending_over` names; without any, each row is one."""
    documents: Documents | None = current_scope()
    causal = _CausalAttention(module, options)
    if documents is None:
        return causal(query, key, value)
    if isinstance(documents, DocumentSpans):
        assert not options.dropout, "the attention kernels do not support dropout"
        out = attend_packed(
            query, key, value, documents,
            scale=options.scaling, window=options.window, softcap=options.softcap,
            sinks=options.sinks,
        )  # fmt: skip
        if documents.padding is not None:
            out = out.masked_fill(documents.padding[:, :, None, None], 0.0)
        return out
    if isinstance(documents, PaddedRows):
        return _attend_padded(causal, query, key, value, documents)
    if isinstance(documents, TwoWaySpans):
        return _attend_two_ways(causal, query, key, value, documents)
    rows = []
    for row, bounds in enumerate(documents):
        outputs = [
            causal(*(t[row : row + 1, :, start:end] for t in (query, key, value)))
            for start, end in itertools.pairwise(bounds)
        ]
        rows.append(torch.cat(outputs, dim=1))
    return torch.cat(rows)


def _attend_padded(
    causal: _CausalAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    padded: PaddedRows,
) -> torch.Tensor:  # fmt: skip
    rows = []
    for row, start in enumerate(padded.starts):
        out = causal(*(t[row : row + 1, :, start:] for t in (query, key, value)))
        rows.append(torch.nn.functional.pad(out, (0, 0, 0, 0, start, 0)))
    return torch.cat(rows)


def _attend_two_ways(
    causal: _CausalAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    documents: TwoWaySpans,
) -> torch.Tensor:  # fmt: skip
    rows = []
    for row, (bounds, spans) in enumerate(zip(documents.bounds, documents.spans, strict=True)):
        outputs = []
        for start, end in itertools.pairwise(bounds):
            queries, keys, values = (t[row : row + 1, :, start:end] for t in (query, key, value))
            inside = [(s - start, e - start) for s, e in spans if start <= s < end]
            outputs.append(causal.with_spans(queries, keys, values, inside))
        out, padding = torch.cat(outputs, dim=1), documents.padding[row]
        hidden = torch.arange(out.shape[1], device=out.device) < padding
        rows.append(out.masked_fill(hidden[None, :, None, None], 0.0) if padding else out)
    return torch.cat(rows)


attend = attention_function(_attend_documents, supports_sinks=True)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that the GPU's kernels can read 16 bytes at a time, if code is compiled.

    torch checks this when it chooses a kernel, but compiled code calls one without a look at
    addresses. Latent attention passes a slice of one product as its values (DeepSeek's). Asking for
    the address at which a slice begins would split the compiled code in two. So its sizes decide: a
    slice starts at a multiple of 16 bytes if its rows, and the rows of the product, are multiples.
    """
    if not (tensor.is_cuda and torch.compiler.is_compiling()):
        return tensor
    elements = 16 // tensor.element_size()
    *outer, inner = tensor.stride()
    fits = inner == 1 and all(size % elements == 0 for size in (tensor.shape[-1], *outer))
    return tensor if fits else tensor.contiguous()


class _CausalAttention:
    """Causal attention over one document, or over rows that are one document each."""

    def __init__(self, module: torch.nn.Module, options: AttentionOptions) -> None:
        self.module = module
        self.scaling, self.dropout, self.window, self.softcap, self.sinks = options

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        if self.softcap is not None or self.sinks is not None:
            return self._in_bands(query, key, value, self._eager)
        if self.window is None or self.window >= length:
            return self._sdpa(query, key, value, None)
        return self._in_bands(query, key, value, self._sdpa)

    def with_spans(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        spans: Sequence[tuple[int, int]],
    ) -> torch.Tensor:  # fmt: skip
        """Attend over one document, of which the tokens of a span also see later ones of it."""
        if not spans:
            return self(query, key, value)
        plain = self.softcap is None and self.sinks is None
        return self._in_bands(query, key, value, self._sdpa if plain else self._eager, spans)

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        # transformers' own call: the same kernels and rounding as without Penstock.
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        call: Any = sdpa_attention_forward
        output: torch.Tensor = call(
            self.module,
            _aligned(query),
            _aligned(key),
            _aligned(value),
            mask,
            dropout=self.dropout,
            scaling=self.scaling,
            is_causal=mask is None,
        )[0]
        return output

    def _eager(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with capped scores or sinks, for which PyTorch has no fused kernel."""
        assert mask is not None
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scale = self.scaling if self.scaling is not None else query.shape[-1] ** -0.5
        scores = torch.matmul(query, key.transpose(2, 3)) * scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            # A sink takes its share of the softmax and contributes nothing to the output.
            sinks = self.sinks.to(scores.dtype).view(1, -1, 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        weights = weights[..., : key.shape[2]]
        weights = torch.nn.functional.dropout(weights, self.dropout)
        return torch.matmul(weights, value).transpose(1, 2).contiguous()

    def _in_bands(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend_band: Callable[..., torch.Tensor],
        spans: Sequence[tuple[int, int]] = (),
    ) -> torch.Tensor:
        """Attend band by band: a band of queries sees its own keys and those one window back.

        A query in a span sees all keys of the span as well.
        """
        length = query.shape[2]
        window = min(self.window or length, length)
        band = min(window, BAND)
        outputs = []
        for start in range(0, length, band):
            end = min(start + band, length)
            touched = [(s, e) for s, e in spans if s < end and e > start]
            first = min((max(0, start - window + 1), *(s for s, _ in touched)))
            last = max((end, *(e for _, e in touched)))
            rows = torch.arange(start, end, device=query.device)[:, None]
            columns = torch.arange(first, last, device=query.device)[None, :]
            mask = (columns <= rows) & (columns > rows - window)
            for s, e in touched:
                mask |= (rows >= s) & (rows < e) & (columns >= s) & (columns < e)
            keys, values = key[:, :, first:last], value[:, :, first:last]
            outputs.append(attend_band(query[:, :, start:end], keys, values, mask[None, None]))
        return torch.cat(outputs, dim=1)
