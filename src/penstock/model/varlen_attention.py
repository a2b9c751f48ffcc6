"""Attention over all documents of packed rows in one call of a variable-length kernel.

The rows are laid end to end, and the kernel gets the list of positions where documents begin. That
list is padded with its last value to one length for every batch, so that compiled code always sees
the same shape. It is passed twice, on the host and on the device: the host's copy gives the number
of documents without waiting for the device.

On a CPU, the same operation is computed document by document in fp32. That is slow, and serves as
the reference for the kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

BLOCK = 128
"""Number of rows, in fp32, by which the kernel's backward pads each document."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of queries, keys and values."""


class DocumentStarts(NamedTuple):
    """Where documents begin, counted over all rows: int32, padded to `tokens + 1` entries."""

    host: torch.Tensor
    device: torch.Tensor


def flatten_bounds(bounds: Sequence[Sequence[int]], device: torch.device) -> DocumentStarts:
    """Convert the document starts of each row, the last entry being the row's length."""
    length = bounds[0][-1]
    tokens = len(bounds) * length
    starts = [row * length + start for row, marks in enumerate(bounds) for start in marks[:-1]]
    host = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    host[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    return DocumentStarts(host, host.to(device))


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: DocumentStarts, *,
    scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Attend causally within documents, at most `window` tokens back, each token's own included.

    Takes `[rows, heads, tokens, head size]` and returns `[rows, tokens, heads, head size]`.
    """
    flat = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: torch.Tensor = _forward(*flat, *starts, scale, window or 0)[0]
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])


class _Group(NamedTuple):
    """The documents of one kernel call."""

    rows: slice
    starts: torch.Tensor
    longest: int


def _groups(host: torch.Tensor, device: torch.Tensor) -> Iterator[_Group]:
    """Yield the kernel calls to make: one, unless documents are very short.

    The kernel's backward pads each document, so a call takes at most as many documents as keep the
    padding no larger than the rows themselves.
    """
    count, most = _count_documents(host), max(1, int(host[-1]) // BLOCK)
    for first in range(0, count, most):
        last = min(first + most, count)
        group = host[first : last + 1]
        rows = slice(int(group[0]), int(group[-1]))
        starts = device[first : last + 1]
        # With a longest document of one token, the kernel would take the call for decoding.
        longest = max(2, int(group.diff().max()))
        yield _Group(rows, starts - starts[0] if first else starts, longest)


def _count_documents(host: torch.Tensor) -> int:
    """Count the entries before the padding."""
    return int(torch.searchsorted(host, host[-1]))


def _window_arguments(window: int) -> dict[str, int]:
    """Return the kernel's arguments for a window; 0 means that there is none."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


# The operation as torch and its compiler know it.

_operation = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cuda")


@_operation("penstock::attend_documents")
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    host: torch.Tensor, device: torch.Tensor, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `[tokens, heads, head size]` and each query's log-sum-exp, `[heads, tokens]`."""
    results = []
    for rows, starts, longest in _groups(host, device):
        q, k, v = query[rows], key[rows], value[rows]
        results.append(
            torch.ops.aten._flash_attention_forward(
                *(q, k, v, starts, starts, longest, longest, 0.0, not window, False),
                scale=scale,
                **_window_arguments(window),
            )[:2]
        )
    return _concatenate([out for out, _ in results], 0), _concatenate([s for _, s in results], 1)


@_operation("penstock::attend_documents_backward")
def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, host: torch.Tensor, device: torch.Tensor,
    scale: float, window: int,
) -> Gradients:  # fmt: skip
    """Return the gradients. With torch's deterministic algorithms, the summation order is fixed."""
    results = []
    unused = torch.empty(0, device=query.device)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    for rows, starts, longest in _groups(host, device):
        parts = (t[rows] for t in (grad, query, key, value, out))
        sums = log_sums[:, rows].contiguous()
        results.append(
            torch.ops.aten._flash_attention_backward(
                *(*parts, sums, starts, starts, longest, longest, 0.0, not window),
                *(no_dropout, unused),
                scale=scale,
                **_window_arguments(window),
            )
        )
    dq, dk, dv = (_concatenate(list(parts), 0) for parts in zip(*results, strict=True))
    return dq, dk, dv


def _concatenate(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


@_forward.register_fake
def _forward_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _size = query.shape
    sums = query.new_empty((heads, tokens), dtype=torch.float32)
    return query.new_empty(query.shape), sums


@_backward.register_fake
def _backward_shapes(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> Gradients:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, host, device, out, log_sums = ctx.saved_tensors
    arguments = (grad.contiguous(), query, key, value, out, log_sums, host, device)
    return (*_backward(*arguments, ctx.scale, ctx.window), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)


# The same operation on a CPU.


@_forward.register_kernel("cpu")
def _forward_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    host: torch.Tensor, device: torch.Tensor, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = query.new_empty(query.shape)
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    for rows in _document_rows(host):
        q, k, v = _heads_first(rows, query, key, value)
        scores = _masked_scores(q, k, scale, window)
        sums[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    return out, sums


@_backward.register_kernel("cpu")
def _backward_on_cpu(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, host: torch.Tensor, device: torch.Tensor,
    scale: float, window: int,
) -> Gradients:  # fmt: skip
    dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    for rows in _document_rows(host):
        q, k, v = _heads_first(rows, query, key, value)
        g, o = (t[rows].transpose(0, 1).float() for t in (grad, out))
        weights = (_masked_scores(q, k, scale, window) - log_sums[:, rows, None]).exp()
        inner = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        for target, made in ((dq, inner @ k), (dk, inner.mT @ q), (dv, weights.mT @ g)):
            # Query heads that share keys and values add up to the gradient of the shared head.
            heads = made.reshape(target.shape[1], -1, *made.shape[1:]).sum(1)
            target[rows] = heads.transpose(0, 1).to(target.dtype)
    return dq, dk, dv


def _document_rows(host: torch.Tensor) -> Iterator[slice]:
    for start, end in itertools.pairwise(host[: _count_documents(host) + 1].tolist()):
        yield slice(start, end)


def _heads_first(rows: slice, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `[heads, tokens, head size]` in fp32, keys and values repeated per query head."""
    heads = tensors[0].shape[1]
    for tensor in tensors:
        first = tensor[rows].transpose(0, 1).float()
        yield first.repeat_interleave(heads // first.shape[0], dim=0)


def _masked_scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    position = torch.arange(query.shape[1])
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (window or query.shape[1]))
    return (query @ key.mT * scale).masked_fill(~visible, float("-inf"))
