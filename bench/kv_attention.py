"""One layer's decode attention alone: the kernel over this cache's views, over a packed tensor, and
FlexAttention over pages. FlexAttention must be compiled; the others are one kernel either way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.kv import attention

PAGE = 128
"""Tokens of a page of FlexAttention's."""

PAGED = (8192, 32768)
"""Contexts for which it is measured: each shape is compiled anew."""


def measure(
    shape: tuple[int, int, int], context: int, batch: int, *, layers: int, device: str
) -> dict[str, float]:
    """Seconds of one call, the least of several; `shape` is heads, shared heads, head size."""
    heads, shared, head = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(batch, heads, 1, head, device=device, dtype=dtype)
    strided = torch.randn(batch, context, layers, 2, shared, head, device=device, dtype=dtype)
    keys, values = (strided[:, :, layers // 2, at].transpose(1, 2) for at in (0, 1))
    packed = [t.contiguous() for t in (keys, values)]
    module = torch.nn.Module()

    def over_views(lengths: list[int]) -> Callable[[], Any]:
        def call() -> Any:
            with attention.rows(lengths, 1):
                return attention.attend(module, query, keys, values, None)

        return call

    def over_packed() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, *packed, enable_gqa=True)

    found = {
        "penstock": _seconds(over_views([context - 1] * batch), device),
        "penstock, ragged": _seconds(over_views(_ragged(context, batch)), device),
        "packed": _seconds(over_packed, device),
    }
    if device == "cuda" and context in PAGED:
        found["flex, paged"] = _seconds(_flex(query, packed, context, batch), device)
    return found


def _ragged(context: int, batch: int) -> list[int]:
    return [max(1, context - 1 - 7 * row) for row in range(batch)]


def _flex(query: torch.Tensor, packed: list[torch.Tensor], context: int, batch: int) -> Any:
    """Every row's tokens in pages that lie anywhere."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keys, values = packed
    _, shared, _, head = keys.shape
    pages = -(-context // PAGE) * batch
    book = PagedAttention(pages, PAGE, batch, device="cuda")
    rows = torch.arange(batch, device="cuda")
    for row in range(batch):
        book.reserve(rows[row], torch.tensor(context, device="cuda"))
    store = [torch.zeros(1, shared, pages * PAGE, head, device="cuda", dtype=keys.dtype)
             for _ in range(2)]  # fmt: skip
    places = torch.arange(context, device="cuda").expand(batch, context).contiguous()
    book.assign(rows, places, keys, values, *store)

    def seen(_b: Any, _h: Any, _q: Any, at: Any) -> Any:
        return at < context

    plain = create_block_mask(seen, batch, 1, 1, context, device="cuda", BLOCK_SIZE=(128, PAGE))
    mask = book.convert_logical_block_mask(plain)
    torch.compiler.reset()  # past a few shapes it would no longer compile
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, *store, block_mask=mask, enable_gqa=True)


def _seconds(call: Callable[[], Any], device: str, rounds: int = 5, calls: int = 20) -> float:
    """The middle of several rounds; in each the device never waits for the host."""
    call()
    found = []
    for _ in range(rounds):
        _settle(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _settle(device)
        found.append((time.perf_counter() - began) / calls)
    return sorted(found)[rounds // 2]


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
