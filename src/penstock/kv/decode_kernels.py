# mypy: ignore-errors
# ruff: noqa: N803
"""Triton kernels for passes that generate one token per row.

A program of `part_kernel` reads a part of one row's keys and values for all query heads that share
them, so that each byte is read once. `join_kernel`, a second, small kernel, joins the parts of a
row. Starts and lengths of rows are read on the device, so the launches in a CUDA graph serve rows
as they grow.

Addresses beyond a row's end may have no memory. Every load is masked by position; none reads past
the end to discard the result later. `penstock.kv.decode_attention` imports this module only where
Triton is installed.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _part_span(ends, row, splits, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first key that a row's query sees, the end, and the number of keys per part.

    Rows are split evenly, in whole blocks. A row without tokens is padding.
    """
    end = tl.load(ends + row)
    first = end * 0
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    part = tl.cdiv(tl.cdiv(end - first, splits), BLOCK) * BLOCK
    return first, end, part


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Return scores in units of log 2, because GPUs compute exponentials to the base of 2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        e = tl.exp2(tl.abs(s) * (-2.0 * _LOG2E) / softcap)  # at most 1, so nothing overflows
        tanh = (1.0 - e) / (1.0 + e)
        s = tl.where(s < 0, -tanh, tanh) * softcap
    return s * _LOG2E


@triton.jit
def _attend_part(
    q, key, value, low, high, scale, softcap, key_token, value_token,
    HEAD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Read keys and values from `low` to below `high` once.

    Returns the highest score, the sum of weights relative to it, and the weighted sum of values.
    """
    d, t = tl.arange(0, q.shape[1]), tl.arange(0, BLOCK)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    for begin in tl.range(low, high, BLOCK, num_stages=STAGES):
        visible = begin + t < high
        token = tl.minimum(begin + t, high - 1).to(tl.int64)  # keep all pointers inside the row
        mask = visible[:, None] & (d < HEAD)[None, :]
        k = tl.load(key + token[:, None] * key_token + d[None, :], mask=mask, other=0.0)
        v = tl.load(value + token[:, None] * value_token + d[None, :], mask=mask, other=0.0)
        s = _scores(q, k, scale, softcap, SOFTCAP)
        s = tl.where(visible[None, :], s, float("-inf"))
        # Online softmax: earlier sums are relative to the highest score so far, so they are scaled
        # whenever a higher one appears.
        new_top = tl.maximum(top, tl.max(s, axis=1))
        rescale = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["splits"])
def part_kernel(
    query, key, value, starts, ends, out, partial, tops, sums, splits, scale, softcap,
    query_row, query_head, key_token, key_head, value_token, value_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend over one part of each row. Grid: shared heads, rows, parts.

    With WHOLE, rows are not split. Heads come first in the grid because those of one token are
    adjacent in memory, and are then read at about the same time. The number of parts is not a
    constant, because the kernel would be compiled for each of many values.
    """
    shared, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, size = _part_span(ends, row, splits, WINDOW, BLOCK)
    low = first + part * size
    high = tl.minimum(low + size, end)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    heads = shared * GROUP + g
    vector = row * tl.num_programs(0) * GROUP + heads
    valid = (g < GROUP)[:, None] & (d < HEAD)[None, :]
    if low < high:
        query_at = query + row.to(tl.int64) * query_row + heads[:, None] * query_head + d[None, :]
        q = tl.load(query_at, mask=valid, other=0.0)
        start = tl.load(starts + row).to(tl.int64)
        key_start, value_start = start * key_token + shared * key_head, start * value_token
        top, total, acc = _attend_part(
            q, key + key_start, value + value_start + shared * value_head, low, high, scale,
            softcap, key_token, value_token, HEAD, BLOCK, STAGES, SOFTCAP,
        )  # fmt: skip
        if WHOLE:
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + vector[:, None] * HEAD + d[None, :], result, mask=valid)
        else:
            index = vector * splits + part
            tl.store(partial + index[:, None] * HEAD + d[None, :], acc, mask=valid)
            tl.store(tops + index, top, mask=g < GROUP)
            tl.store(sums + index, total, mask=g < GROUP)
    elif WHOLE:  # a row without tokens
        zeros = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32).to(out.dtype.element_ty)
        tl.store(out + vector[:, None] * HEAD + d[None, :], zeros, mask=valid)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    ends, out, partial, tops, sums, splits,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Join the parts of each row. Grid: query heads, rows.

    All parts are read in one load: one after the other, each would wait for memory.
    """
    row = tl.program_id(1)
    vector = row * tl.num_programs(0) + tl.program_id(0)
    first, end, size = _part_span(ends, row, splits, WINDOW, BLOCK)
    part, d = tl.arange(0, SPLITS_PAD), tl.arange(0, HEAD_PAD)
    exists = (part < splits) & (first + part * size < end)
    index = vector * splits + part
    top = tl.load(tops + index, mask=exists, other=float("-inf"))
    total = tl.load(sums + index, mask=exists, other=0.0)
    mask = exists[:, None] & (d < HEAD)[None, :]
    acc = tl.load(partial + index[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
    highest = tl.max(top, axis=0)
    highest = tl.where(first < end, highest, 0.0)  # -inf in a row without tokens, which gives NaN
    weight = tl.exp2(top - highest)
    weight_sum = tl.sum(weight * total, axis=0)
    result = tl.sum(weight[:, None] * acc, axis=0) / tl.where(first < end, weight_sum, 1.0)
    tl.store(out + vector * HEAD + d, result.to(out.dtype.element_ty), mask=d < HEAD)


@triton.jit
def write_kernel(
    key, value, to_key, to_value, positions, key_row, key_head, value_row, value_head,
    to_key_token, to_key_head, to_value_token, to_value_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one new token per row to the cache. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    h, d = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HEAD_PAD)[None, :]
    valid = (h < HEADS) & (d < HEAD)
    k = tl.load(key + row * key_row + h * key_head + d, mask=valid)
    v = tl.load(value + row * value_row + h * value_head + d, mask=valid)
    tl.store(to_key + position * to_key_token + h * to_key_head + d, k, mask=valid)
    tl.store(to_value + position * to_value_token + h * to_value_head + d, v, mask=valid)


@triton.jit
def blend_kernel(
    first, second, first_log_sum, second_log_sum, out, new,
    first_row, first_head, first_query, second_row, second_head, second_query,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join two parts of attention. Grid: blocks of queries, heads, rows.

    Each part is weighted by its share of the sum of weights, given as logarithms.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_PAD)
    heads = tl.num_programs(1)
    index = (row * heads + head) * new + t
    difference = tl.load(second_log_sum + index, mask=t < new, other=0.0)
    difference -= tl.load(first_log_sum + index, mask=t < new, other=0.0)
    share = (1.0 / (1.0 + tl.exp2(difference * _LOG2E)))[:, None]
    valid = (t < new)[:, None] & (d < HEAD)[None, :]
    query = t[:, None].to(tl.int64)
    x = tl.load(first + row * first_row + head * first_head + query * first_query + d[None, :],
                mask=valid, other=0.0).to(tl.float32)  # fmt: skip
    y = tl.load(second + row * second_row + head * second_head + query * second_query + d[None, :],
                mask=valid, other=0.0).to(tl.float32)  # fmt: skip
    result = (x * share + y * (1.0 - share)).to(out.dtype.element_ty)
    tl.store(out + ((row * new + query) * heads + head) * HEAD + d[None, :], result, mask=valid)
