"""One layer's decode attention alone: Penstock's kernel and torch's over this cache's views,
torch's over a packed tensor, and FlexAttention over pages, which must be compiled.

On a GPU, calls are recorded and played as one, so that the host's launches are not in the figures,
and each arm says which kernels it ran. Short contexts lie in the GPU's cache after the first call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.generate import attention
from penstock.kv import decode_attention

PAGE = 128
"""Tokens of a page of FlexAttention's."""

PAGED = (8192, 32768)
"""Contexts for which it is measured: each shape is compiled anew."""


Call = Callable[[], Any]


def measure(
    shape: tuple[int, int, int], context: int, batch: int, *, layers: int, device: str
) -> dict[str, Any]:
    """Seconds of one call, and kernels, by arm; `shape` is heads, shared heads, head size."""
    heads, shared, head = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(batch, heads, 1, head, device=device, dtype=dtype)
    strided = torch.randn(batch, context, layers, 2, shared, head, device=device, dtype=dtype)
    keys, values = (strided[:, :, layers // 2, at].transpose(1, 2) for at in (0, 1))
    packed = [t.contiguous() for t in (keys, values)]
    even, ragged = [context - 1] * batch, _ragged(context, batch)

    def over_packed() -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, packed[0], packed[1], enable_gqa=True)

    arms = {
        "penstock": _ours(query, keys, values, even),
        "penstock, ragged": _ours(query, keys, values, ragged),
        "packed": over_packed,
    }
    if attention.flash_fits(query, None):
        arms["flash"] = _flash(query, keys, values, even)
        arms["flash, ragged"] = _flash(query, keys, values, ragged)
    if device == "cuda" and context in PAGED:
        arms["flex, paged"] = _flex(query, packed, context, batch)
    nbytes = 2 * sum(each + 1 for each in even) * shared * head * dtype.itemsize
    found: dict[str, Any] = {"nbytes": nbytes}
    for name, call in arms.items():
        record = device == "cuda" and name != "flex, paged"  # whose wrapper may look at tensors
        found[name] = {"seconds": _seconds(call, device, record), "kernels": _kernels(call, device)}
    return found


def _ours(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int]
) -> Call:
    """As a recorded pass calls it: where rows lie is on the device already."""
    per_row = keys.stride(0) // keys.stride(2)
    starts = torch.arange(len(lengths), device=query.device) * per_row
    ends = torch.tensor(lengths, device=query.device) + 1
    where = decode_attention.Spots(starts, ends, decode_attention.bucket(max(lengths) + 1))
    module = torch.nn.Module()

    def call() -> Any:
        with attention.spots(where):
            return attention.attend(module, query, keys, values, None)

    return call


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int]
) -> Call:
    """torch's flash kernel over the same views, as it runs where Triton is missing."""
    one = attention.Attention(attention.Rows(tuple(lengths), 1), None, None, None)
    return lambda: one.flash(query, keys, values)


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


def _seconds(call: Call, device: str, record: bool, rounds: int = 5, calls: int = 20) -> float:
    """The middle of several rounds."""
    call()
    play = _recorded(call, calls) if record else lambda: [call() for _ in range(calls)]
    found = []
    for _ in range(rounds):
        _settle(device)
        began = time.perf_counter()
        play()
        _settle(device)
        found.append((time.perf_counter() - began) / calls)
    return sorted(found)[rounds // 2]


def _recorded(call: Call, calls: int) -> Call:
    graph: Any = torch.cuda.CUDAGraph()
    _settle("cuda")
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph.replay  # type: ignore[no-any-return]


def _kernels(call: Call, device: str) -> list[str]:
    """The names of what ran on the GPU."""
    if device != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        _settle(device)
    return sorted({event.name for event in seen.events() if event.device_type.name == "CUDA"})


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
