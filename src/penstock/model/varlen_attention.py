"""Attention over all documents of packed rows in one call, whose results repeat to the bit.

The rows are laid end to end, and the operation gets the first and last token of each token's
document as one tensor, so compiled code sees the same shape however a batch is packed. The tensor
also says in which order a GPU computes blocks of tokens. Rows that are one document each are passed
in the same way.

On a GPU, the operation runs the kernels in `penstock.model.attention_kernels`. On a CPU, it is
computed document by document in fp32. That is slow, and serves as the reference for the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from penstock.model import attention_launch
from penstock.model.attention_launch import Layout, document_spans
from penstock.model.attention_replay import Results, compute_or_replay
from penstock.model.attention_sizes import padded_tokens

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of queries, keys and values."""


class DocumentSpans(NamedTuple):
    """The documents of all rows, laid end to end."""

    spans: torch.Tensor
    """What `document_spans` returns: the first and last token of each token's document, and the
    order of programs."""
    padding: torch.Tensor | None = None
    """True for tokens before the first one of their row that counts, `[rows, tokens]`; None if
    there are none. They are documents of their own, for which attention returns zeros."""


def flatten_bounds(bounds: Sequence[Sequence[int]], device: torch.device) -> DocumentSpans:
    """Convert the document starts of each row, the last entry being the row's length."""
    length = bounds[0][-1]
    starts = [row * length + start for row, marks in enumerate(bounds) for start in marks[:-1]]
    return DocumentSpans(document_spans([*starts, len(bounds) * length]).to(device))


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: DocumentSpans, *,
    scale: float | None, window: int | None, softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend causally within documents, at most `window` tokens back, each token's own included.

    Takes `[rows, heads, tokens, head size]` and returns `[rows, tokens, heads, head size]`. With
    `softcap`, a score is replaced by `tanh(score / softcap) * softcap`. `sinks` are scores, one for
    each head, that take part in the softmax but have no value.
    """
    flat = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = (documents.spans, scale, window or 0, softcap or 0.0)
    output: torch.Tensor
    if sinks is None:
        output = _forward(*flat, *options)[0]
    else:
        output = _AttendWithSinks.apply(*flat, sinks, *options)[0]  # type: ignore[no-untyped-call]
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])


# The operation as torch and its compiler know it. A window or a cap of 0 means that there is none.

_operation = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cuda")


@_operation("penstock::attend_documents")
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor,
    scale: float, window: int, cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `[tokens, heads, head size]` and each query's log-sum-exp, `[heads, padded tokens]`.

    The log-sum-exps are natural logarithms. Those of padding are undefined. Neither is computed if
    the caller has saved them (`penstock.model.attention_replay`).
    """
    layout = Layout(spans, scale, window, cap)
    return compute_or_replay(query, lambda: attention_launch.forward(query, key, value, layout))


@_operation("penstock::attend_documents_backward")
def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, spans: torch.Tensor,
    scale: float, window: int, cap: float,
) -> Gradients:  # fmt: skip
    layout = Layout(spans, scale, window, cap)
    return attention_launch.backward(grad, query, key, value, out, log_sums, layout)


@_forward.register_fake
def _forward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _size = query.shape
    sums = query.new_empty((heads, padded_tokens(tokens)), dtype=torch.float32)
    return query.new_empty(query.shape), sums


@_backward.register_fake
def _backward_shapes(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> Gradients:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.cap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, spans, out, log_sums = ctx.saved_tensors
    arguments = (grad.contiguous(), query, key, value, out, log_sums, spans)
    return (*_backward(*arguments, ctx.scale, ctx.window, ctx.cap), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


class _AttendWithSinks(torch.autograd.Function):
    """Attention with sinks, from the results of attention without them.

    A sink only adds a term to the denominator of the softmax. So forward corrects the outputs and
    log-sum-exps afterwards, and backward is that of attention with the corrected ones.
    """

    @staticmethod
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor,
        spans: torch.Tensor, scale: float, window: int, cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, log_sums = _forward(query, key, value, spans, scale, window, cap)
        totals = torch.logaddexp(log_sums, sinks.float()[:, None])
        shares = (log_sums - totals)[:, : out.shape[0]].exp()
        return (out * shares.T[:, :, None]).to(out.dtype), totals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.scale, ctx.window, ctx.cap = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        query, key, value, sinks, spans, out, totals = ctx.saved_tensors
        options = (ctx.scale, ctx.window, ctx.cap)
        grad = grad.contiguous()
        gradients = _backward(grad, query, key, value, out, totals, spans, *options)
        shares = (sinks.float()[:, None] - totals)[:, : out.shape[0]].exp()
        deltas = (grad.float() * out.float()).sum(-1)
        of_sinks = -(shares * deltas.T).sum(-1).to(sinks.dtype)
        return (*gradients, of_sinks, None, None, None, None)


# The same operation on a CPU.


@_forward.register_kernel("cpu")
def _forward_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: torch.Tensor,
    scale: float, window: int, cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    layout = Layout(spans, scale, window, cap)
    return compute_or_replay(query, lambda: _compute_on_cpu(query, key, value, layout))


def _compute_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout
) -> Results:
    spans, scale, window, cap = layout
    out = query.new_empty(query.shape)
    tokens, heads, _size = query.shape
    sums = query.new_zeros((heads, padded_tokens(tokens)), dtype=torch.float32)
    for rows in _document_rows(spans, tokens):
        q, k, v = _heads_first(rows, query, key, value)
        scores = _mask(_cap(q @ k.mT * scale, cap), window)
        sums[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    return out, sums


@_backward.register_kernel("cpu")
def _backward_on_cpu(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, spans: torch.Tensor,
    scale: float, window: int, cap: float,
) -> Gradients:  # fmt: skip
    dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    for rows in _document_rows(spans, query.shape[0]):
        q, k, v = _heads_first(rows, query, key, value)
        g, o = (t[rows].transpose(0, 1).float() for t in (grad, out))
        scores = _cap(q @ k.mT * scale, cap)
        weights = (_mask(scores, window) - log_sums[:, rows, None]).exp()
        inner = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        if cap:
            inner = inner * (1 - (scores / cap).square())
        for target, made in ((dq, inner @ k), (dk, inner.mT @ q), (dv, weights.mT @ g)):
            # Query heads that share keys and values add up to the gradient of the shared head.
            heads = made.reshape(target.shape[1], -1, *made.shape[1:]).sum(1)
            target[rows] = heads.transpose(0, 1).to(target.dtype)
    return dq, dk, dv


def _document_rows(spans: torch.Tensor, tokens: int) -> Iterator[slice]:
    start = 0
    while start < tokens:
        end = int(spans[1, start]) + 1
        yield slice(start, end)
        start = end


def _heads_first(rows: slice, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `[heads, tokens, head size]` in fp32, keys and values repeated per query head."""
    heads = tensors[0].shape[1]
    for tensor in tensors:
        first = tensor[rows].transpose(0, 1).float()
        yield first.repeat_interleave(heads // first.shape[0], dim=0)


def _cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(scores / cap) * cap if cap else scores


def _mask(scores: torch.Tensor, window: int) -> torch.Tensor:
    position = torch.arange(scores.shape[-1])
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (window or scores.shape[-1]))
    return scores.masked_fill(~visible, float("-inf"))
