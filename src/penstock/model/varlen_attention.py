"""All documents of packed rows in one call of a variable-length kernel. Room: move.

Rows are laid end to end, and the kernel is told where documents begin. That list has one length
whatever the batch holds (it is padded with its last value), so compiled code sees one shape. It
comes twice, on the host and on the device: the host's copy says how many documents there are
without waiting for the device.

On a CPU the same operation is computed document by document, in fp32: slow, and what the kernel is
held against.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

BLOCK = 128
"""Rows that the kernel's backward pads each document by, in fp32."""

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Cuts(NamedTuple):
    """Where documents begin, counted over all rows: int32, tokens + 1 of them."""

    host: torch.Tensor
    device: torch.Tensor


def cut_rows(bounds: Sequence[Sequence[int]], device: torch.device) -> Cuts:
    """From each row's own beginnings, the row's length being the last."""
    length = bounds[0][-1]
    tokens = len(bounds) * length
    starts = [row * length + low for row, marks in enumerate(bounds) for low in marks[:-1]]
    host = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    host[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    return Cuts(host, host.to(device))


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cuts: Cuts, *,
    scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """[rows, heads, tokens, head size] to [rows, tokens, heads, head size]; causal, and no further
    back than `window` tokens, each token's own included."""
    flat = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: torch.Tensor = _forward(*flat, *cuts, scale, window or 0)[0]
    return found.view(query.shape[0], query.shape[2], *found.shape[1:])


class _Group(NamedTuple):
    """Documents of one call of the kernel."""

    rows: slice
    cuts: torch.Tensor
    longest: int


def _groups(host: torch.Tensor, device: torch.Tensor) -> Iterator[_Group]:
    """One, unless documents are so short that padding each of them would take more than the rows
    themselves do."""
    count, most = _count(host), max(1, int(host[-1]) // BLOCK)
    for first in range(0, count, most):
        last = min(first + most, count)
        here = host[first : last + 1]
        rows = slice(int(here[0]), int(here[-1]))
        cuts = device[first : last + 1]
        longest = max(2, int(here.diff().max()))  # one token each would be decoding, done otherwise
        yield _Group(rows, cuts - cuts[0] if first else cuts, longest)


def _count(host: torch.Tensor) -> int:
    """Documents: what comes before the padding."""
    return int(torch.searchsorted(host, host[-1]))


def _reach(window: int) -> dict[str, int]:
    """What the kernel wants to know of a window; -1 for none."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


# The operation, as torch and its compiler know it.

_operation = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cuda")


@_operation("penstock::attend_documents")
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    host: torch.Tensor, device: torch.Tensor, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """[tokens, heads, head size], and the logarithm of each query's sum, [heads, tokens]."""
    made = []
    for rows, cuts, longest in _groups(host, device):
        q, k, v = query[rows], key[rows], value[rows]
        made.append(
            torch.ops.aten._flash_attention_forward(
                *(q, k, v, cuts, cuts, longest, longest, 0.0, not window, False),
                scale=scale,
                **_reach(window),
            )[:2]
        )
    return _joined([out for out, _ in made], 0), _joined([log_sum for _, log_sum in made], 1)


@_operation("penstock::attend_documents_backward")
def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, host: torch.Tensor, device: torch.Tensor,
    scale: float, window: int,
) -> Three:  # fmt: skip
    """Sums in one order, always, where torch is told to be deterministic."""
    made = []
    unused = torch.empty(0, device=query.device)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    for rows, cuts, longest in _groups(host, device):
        parts = (t[rows] for t in (grad, query, key, value, out))
        sums = log_sums[:, rows].contiguous()
        made.append(
            torch.ops.aten._flash_attention_backward(
                *(*parts, sums, cuts, cuts, longest, longest, 0.0, not window, no_dropout, unused),
                scale=scale,
                **_reach(window),
            )
        )
    dq, dk, dv = (_joined(list(parts), 0) for parts in zip(*made, strict=True))
    return dq, dk, dv


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
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
) -> Three:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, host, device, out, log_sums = ctx.saved_tensors
    given = (grad.contiguous(), query, key, value, out, log_sums, host, device)
    return (*_backward(*given, ctx.scale, ctx.window), None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_keep)


# The same on a CPU.


@_forward.register_kernel("cpu")
def _forward_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    host: torch.Tensor, device: torch.Tensor, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = query.new_empty(query.shape)
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    for rows in _documents(host):
        q, k, v = _heads_first(rows, query, key, value)
        scores = _scores(q, k, scale, window)
        sums[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
    return out, sums


@_backward.register_kernel("cpu")
def _backward_by_hand(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, host: torch.Tensor, device: torch.Tensor,
    scale: float, window: int,
) -> Three:  # fmt: skip
    dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    for rows in _documents(host):
        q, k, v = _heads_first(rows, query, key, value)
        g, o = (t[rows].transpose(0, 1).float() for t in (grad, out))
        weights = (_scores(q, k, scale, window) - log_sums[:, rows, None]).exp()
        inner = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        for into, made in ((dq, inner @ k), (dk, inner.mT @ q), (dv, weights.mT @ g)):
            heads = made.reshape(into.shape[1], -1, *made.shape[1:]).sum(1)  # that share keys
            into[rows] = heads.transpose(0, 1).to(into.dtype)
    return dq, dk, dv


def _documents(host: torch.Tensor) -> Iterator[slice]:
    for low, high in itertools.pairwise(host[: _count(host) + 1].tolist()):
        yield slice(low, high)


def _heads_first(rows: slice, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """[heads, tokens, head size] in fp32, keys and values once per query head."""
    heads = tensors[0].shape[1]
    for tensor in tensors:
        first = tensor[rows].transpose(0, 1).float()
        yield first.repeat_interleave(heads // first.shape[0], dim=0)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    at = torch.arange(query.shape[1])
    behind = at[:, None] - at[None, :]
    seen = (behind >= 0) & (behind < (window or query.shape[1]))
    return (query @ key.mT * scale).masked_fill(~seen, float("-inf"))
