"""Measure the decode attention of one layer, for bench_kv.

Compares Penstock's kernel and torch's over the views of Penstock's cache, torch's over a packed
tensor, and compiled FlexAttention over pages. On a GPU, several calls are recorded as one CUDA
graph, so that launches are not measured, and each result names the kernels that ran. Short contexts
stay in the GPU's L2 cache after the first call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.generate import attention
from penstock.kv import decode_attention
from penstock.model.attention import attending_over

PAGE = 128
"""Tokens per page of FlexAttention."""

PAGED = (8192, 32768)
"""Contexts for which FlexAttention is measured. Each shape must be compiled."""


Call = Callable[[], Any]


def measure(
    shape: tuple[int, int, int], context: int, batch: int, *, layers: int, device: str
) -> dict[str, Any]:
    """Return the seconds of one call, and the kernels, of each arm.

    `shape` contains the number of query heads, of key-value heads, and the head size.
    """
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
    results: dict[str, Any] = {"nbytes": nbytes}
    for name, call in arms.items():
        record = (
            device == "cuda" and name != "flex, paged"
        )  # its wrapper may read tensors on the host
        results[name] = {
            "seconds": _seconds(call, device, record),
            "kernels": _kernels(call, device),
        }
    return results


def _ours(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int]
) -> Call:
    """Call Penstock's kernel as a recorded pass does: row positions are already on the device."""
    per_row = keys.stride(0) // keys.stride(2)
    starts = torch.arange(len(lengths), device=query.device) * per_row
    ends = torch.tensor(lengths, device=query.device) + 1
    longest = decode_attention.length_bound(max(lengths) + 1)
    spans = decode_attention.RowSpans(starts, ends, longest)
    module = torch.nn.Module()

    def call() -> Any:
        with attending_over(spans):
            return attention.attend(module, query, keys, values, None)

    return call


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int]
) -> Call:
    """Call torch's flash kernel on the same views, as Penstock does without Triton."""
    rows = attention.RowAttention(attention.RowLengths(tuple(lengths), 1), None, None, None)
    return lambda: rows.flash(query, keys, values)


def _ragged(context: int, batch: int) -> list[int]:
    return [max(1, context - 1 - 7 * row) for row in range(batch)]


def _flex(query: torch.Tensor, packed: list[torch.Tensor], context: int, batch: int) -> Any:
    """Call FlexAttention with the tokens of each row in pages."""
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
    torch.compiler.reset()  # torch stops compiling after a few shapes otherwise
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(query, *store, block_mask=mask, enable_gqa=True)


def _seconds(call: Call, device: str, record: bool, rounds: int = 5, calls: int = 20) -> float:
    """Return the median over rounds of the seconds of one call."""
    call()
    play = _recorded(call, calls) if record else lambda: [call() for _ in range(calls)]
    seconds = []
    for _ in range(rounds):
        _settle(device)
        began = time.perf_counter()
        play()
        _settle(device)
        seconds.append((time.perf_counter() - began) / calls)
    return sorted(seconds)[rounds // 2]


def _recorded(call: Call, calls: int) -> Call:
    graph: Any = torch.cuda.CUDAGraph()
    _settle("cuda")
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph.replay  # type: ignore[no-any-return]


def _kernels(call: Call, device: str) -> list[str]:
    """Return the names of the kernels that ran on the GPU."""
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
