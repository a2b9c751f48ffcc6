"""Attention of a long prompt's next chunk, in two parts that are joined. Room: hold.

Queries of a chunk see all that was read before, and of the chunk itself what lies not after them.
From Hopper on, cuDNN's kernels are faster than the flash kernel, but they align a causal mask with
the first key. So the two parts are computed by one call each, and joined by their sums of weights.
A prompt that is read 4096 tokens at a time then takes about as long as one that is read at once.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from penstock.kv import decode
from penstock.kv.errors import KvWarning, first_line

OLDEST = (9, 0)
"""Compute capability from which on cuDNN's kernels are the faster ones."""

LEAST = 512
"""Queries below which one call of the flash kernel is as good."""

WIDEST = 128
"""Head size up to which cuDNN has kernels for every layout."""

BLOCK = 16
"""Queries that a program joins."""

Part = tuple[torch.Tensor, torch.Tensor]
"""[rows, heads, queries, head size], and the logarithm of the sum of weights of each query."""

_refused: set[str] = set()
_switches: Any = torch.backends.cuda


def fits(query: torch.Tensor) -> bool:
    """Whether such queries can be had this way."""
    _, _, new, head = query.shape
    return (
        query.is_cuda
        and new >= LEAST
        and head <= WIDEST
        and head % 8 == 0
        and query.dtype in (torch.bfloat16, torch.float16)
        and not _refused
        and _switches.cudnn_sdp_enabled()
        and _new_enough(query.device)
    )


@functools.cache
def _new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST and decode.available(device)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scaling: float | None
) -> torch.Tensor | None:
    """Of rows that all hold `length` tokens before: [rows, queries, heads, head size]. None if
    cuDNN refuses; it is not asked again then."""
    end = length + query.shape[2]
    keys, values = ((t[:, :, :length], t[:, :, length:end]) for t in (key, value))
    try:
        before = part(query, keys[0], values[0], scaling, causal=False)
        own = part(query, keys[1], values[1], scaling, causal=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as refused:
        _refused.add(str(refused))
        warnings.warn(
            "cuDNN's attention cannot be used for prompts, which are read more slowly: "
            + first_line(refused),
            KvWarning,
            stacklevel=2,
        )
        return None
    return join(before, own)


def part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *,
    causal: bool,
) -> Part:  # fmt: skip
    rows, heads, new, _ = query.shape
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scaling
    )
    return found[0], found[1].reshape(rows, heads, new)


def join(first: Part, second: Part) -> torch.Tensor:
    """Both parts of the same queries: [rows, queries, heads, head size]."""
    (x, above), (y, below) = first, second
    if not decode.available(x.device):
        share = torch.sigmoid(above - below)[..., None]
        return (x * share + y * (1 - share)).to(x.dtype).transpose(1, 2)
    rows, heads, new, head = x.shape
    out = torch.empty(rows, new, heads, head, dtype=x.dtype, device=x.device)
    with decode.on(x.device):
        decode.kernels().blend_kernel[(-(-new // BLOCK), heads, rows)](
            x, y, above.contiguous(), below.contiguous(), out, new,
            *x.stride()[:3], *y.stride()[:3],
            HEAD=head, HEAD_PAD=decode.power(head), BLOCK=BLOCK,
        )  # fmt: skip
    return out
