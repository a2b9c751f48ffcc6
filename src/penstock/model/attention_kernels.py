# mypy: ignore-errors
# ruff: noqa: N803
"""Triton kernels for causal attention within documents, forward and backward.

All documents lie end to end in one stream of tokens, and a tile is a block of that stream, wherever
documents begin. `firsts` and `lasts` give the first and last token of each token's document: query
`i` sees the keys from `firsts[i]` to `i`, and with WINDOW only the last WINDOW of them. Both bounds
grow with the token, so one look-up at each end of a tile tells which tiles need a mask and which
are skipped. Several short documents share a tile, and none is padded.

Programs start in the order of a table that follows `firsts` (for queries) or `lasts` (for keys):
those with the most work first, so that the GPU's multiprocessors finish at about the same time.

No sum depends on timing: `query_gradient_kernel` owns a block of queries and adds over the keys in
order, and `key_gradient_kernel` owns a block of keys and adds over the query heads that share them,
and over the queries, in order. Scores are computed twice for that, and nothing is ever added to
memory by several programs.

Queries, outputs and their gradients are `[tokens, heads, head size]`, keys, values and theirs
`[tokens, shared heads, head size]`; log-sum-exps (natural, of the scaled and capped scores) and
deltas are `[heads, padded tokens]` in fp32.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
PADDING = tl.constexpr(128)
"""Arrays of one number per token are padded to a multiple of this: whole tiles are loaded and
stored. It is a multiple of every tile's numbers of queries and keys. The table of the order of
programs counts in blocks of this size."""
PRECISION = tl.constexpr("ieee")
"""Precision of fp32 products: Triton's default is TF32, with 10 bits of mantissa. Those of 16-bit
numbers do not depend on it."""
HIDDEN = tl.constexpr(-1.0e30)
"""Score of a key that a query does not see. Finite: a row of a tile may see no key of the tile."""


@triton.jit
def _rows(
    base, heads, head, low, tokens,
    BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """Load the rows of one head from token `low` on, filled with zeros up to the width of a tile.

    Rows beyond the last token have weights of 0, and may be anything finite. With COPY_ENGINE,
    `base` describes a matrix of `[tokens, heads * D]`, and the copy engine of the GPU (TMA)
    computes the addresses.
    """
    if COPY_ENGINE:
        tile = base.load([low, head * D])
    else:
        columns = tl.arange(0, WIDE)
        index = tl.minimum(low + tl.arange(0, BLOCK), tokens - 1)  # cheaper than a mask
        pointers = base + (index.to(tl.int64) * heads + head)[:, None] * D + columns[None, :]
        if WIDE == D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tile


@triton.jit
def _store_rows(base, heads, head, index, tokens, tile, D: tl.constexpr, WIDE: tl.constexpr):
    columns = tl.arange(0, WIDE)
    pointers = base + (index.to(tl.int64) * heads + head)[:, None] * D + columns[None, :]
    inside = (index < tokens)[:, None] & (columns < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _padded(tokens):
    """Return the length of arrays of one number per token."""
    return tl.cdiv(tokens, PADDING) * PADDING


@triton.jit
def _first_row(spans, tokens, BLOCK: tl.constexpr):
    """Return the first row of this program's tile. It may be beyond the last token.

    `spans` are `firsts` or `lasts`, which the table of the order of blocks follows.
    """
    turn = tl.program_id(0)
    block = tl.load(spans + _padded(tokens) + turn // (PADDING // BLOCK))
    return block * PADDING + turn % (PADDING // BLOCK) * BLOCK


@triton.jit
def _numbers(base, low, BLOCK: tl.constexpr, COPY_ENGINE: tl.constexpr):
    """Load one number per token from `low` on; arrays are long enough for whole tiles.

    Inside a loop, the copy engine saves the pointers, which take more registers than the numbers.
    """
    return base.load([low]) if COPY_ENGINE else tl.load(base + low + tl.arange(0, BLOCK))


@triton.jit
def _first_key(firsts, token, WINDOW: tl.constexpr):
    """Return the first key that the query `token` sees."""
    first = tl.load(firsts + token)
    return tl.maximum(first, token - WINDOW + 1) if WINDOW else first


@triton.jit
def _last_query(lasts, token, WINDOW: tl.constexpr):
    """Return the last query that sees the key `token`."""
    last = tl.load(lasts + token)
    return tl.minimum(last, token + WINDOW - 1) if WINDOW else last


@triton.jit
def _visible(index, keys, first, WINDOW: tl.constexpr):
    """Return which queries see which keys. The arguments are shaped so that they broadcast."""
    seen = (keys <= index) & (keys >= first)
    return seen & (index - keys < WINDOW) if WINDOW else seen


@triton.jit
def _in_registers(tile, WIDE: tl.constexpr):
    """Return the tile in the registers where a product leaves its result.

    As the left factor of a product, it is then not read from shared memory again in each iteration.
    Triton has no other way to ask for that. Multiplying by one is exact.
    """
    columns = tl.arange(0, WIDE)
    one = (columns[:, None] == columns[None, :]).to(tile.dtype)
    return tl.dot(tile, one, input_precision=PRECISION).to(tile.dtype)


@triton.jit
def _cap(scores, cap):
    """Return `tanh(scores / cap)`. As a quotient, which is exact to 1e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / cap)))


@triton.jit
def _key_range(
    firsts, low, tokens,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return where a block of queries begins to see keys, where all of its queries see all keys,
    where that ends, and where the keys end. All but the last are multiples of BLOCK_N."""
    last = tl.minimum(low + BLOCK_M, tokens) - 1
    start = _first_key(firsts, low, WINDOW) // BLOCK_N * BLOCK_N
    whole = _first_key(firsts, last, WINDOW)
    diagonal = low // BLOCK_N * BLOCK_N
    whole = tl.minimum(tl.cdiv(whole, BLOCK_N) * BLOCK_N, diagonal)
    return start, whole, diagonal, last + 1


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    query, key, value, out, log_sums, firsts, tokens, scale, cap,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exps of one block of queries of one head."""
    low = _first_row(firsts, tokens, BLOCK_M)
    if low >= tokens:
        return
    head = tl.program_id(1)
    shared = head // (HEADS // SHARED)
    index = low + tl.arange(0, BLOCK_M)
    start, whole, diagonal, end = _key_range(firsts, low, tokens, BLOCK_M, BLOCK_N, WINDOW)
    first = tl.load(firsts + index)
    q = _rows(query, HEADS, head, low, tokens, BLOCK_M, D, WIDE, COPY_ENGINE)
    if IN_REGISTERS:
        q = _in_registers(q, WIDE)
    top = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    for at in tl.range(start, end, BLOCK_N):
        k = _rows(key, SHARED, shared, at, tokens, BLOCK_N, D, WIDE, COPY_ENGINE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = _cap(scores * scale, cap) * (cap * LOG2_E)
        if not CAPPED:
            scores = scores * (scale * LOG2_E)
        if (at < whole) | (at >= diagonal):
            keys = at + tl.arange(0, BLOCK_N)
            visible = _visible(index[:, None], keys[None, :], first[:, None], WINDOW)
            scores = tl.where(visible, scores, HIDDEN)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v = _rows(value, SHARED, shared, at, tokens, BLOCK_N, D, WIDE, COPY_ENGINE)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = higher
    _store_rows(out, HEADS, head, index, tokens, acc / total[:, None], D, WIDE)
    sums = (top + tl.log2(total)) / LOG2_E
    tl.store(log_sums + head * _padded(tokens) + index, sums)


@triton.jit(do_not_specialize=["tokens"])
def query_gradient_kernel(
    grad, query, key, value, out, log_sums, deltas, dquery, firsts, tokens, scale, cap,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of queries of one head, and the queries' deltas.

    A delta is the product of an output and its gradient. `key_gradient_kernel` reads it.
    """
    low = _first_row(firsts, tokens, BLOCK_M)
    if low >= tokens:
        return
    head = tl.program_id(1)
    shared = head // (HEADS // SHARED)
    index = low + tl.arange(0, BLOCK_M)
    numbers = head * _padded(tokens) + index
    do = _rows(grad, HEADS, head, low, tokens, BLOCK_M, D, WIDE, COPY_ENGINE)
    o = _rows(out, HEADS, head, low, tokens, BLOCK_M, D, WIDE, COPY_ENGINE)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(deltas + numbers, delta)
    q = _rows(query, HEADS, head, low, tokens, BLOCK_M, D, WIDE, COPY_ENGINE)
    if IN_REGISTERS:
        q = _in_registers(q, WIDE)
        do = _in_registers(do, WIDE)
    log_sum = tl.load(log_sums + numbers) * LOG2_E
    start, whole, diagonal, end = _key_range(firsts, low, tokens, BLOCK_M, BLOCK_N, WINDOW)
    first = tl.load(firsts + index)
    dq = tl.zeros([BLOCK_M, WIDE], tl.float32)
    for at in tl.range(start, end, BLOCK_N):
        k = _rows(key, SHARED, shared, at, tokens, BLOCK_N, D, WIDE, COPY_ENGINE)
        v = _rows(value, SHARED, shared, at, tokens, BLOCK_N, D, WIDE, COPY_ENGINE)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            capped = _cap(scores * scale, cap)
            weights = tl.exp2(capped * (cap * LOG2_E) - log_sum[:, None])
        else:
            weights = tl.exp2(scores * (scale * LOG2_E) - log_sum[:, None])
        if (at < whole) | (at >= diagonal):
            keys = at + tl.arange(0, BLOCK_N)
            visible = _visible(index[:, None], keys[None, :], first[:, None], WINDOW)
            weights = tl.where(visible, weights, 0.0)
        inner = weights * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if CAPPED:
            inner = inner * (1.0 - capped * capped)
        dq = tl.dot(inner.to(k.dtype), k, dq, input_precision=PRECISION)
    _store_rows(dquery, HEADS, head, index, tokens, dq * scale, D, WIDE)


@triton.jit(do_not_specialize=["tokens"])
def key_gradient_kernel(
    grad, query, key, value, log_sums, deltas, dkey, dvalue, firsts, lasts, tokens, scale, cap,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys, of values or of both, of one shared head."""
    low = _first_row(lasts, tokens, BLOCK_N)
    if low >= tokens:
        return
    shared = tl.program_id(1)
    keys = low + tl.arange(0, BLOCK_N)
    last = tl.minimum(low + BLOCK_N, tokens) - 1
    # Queries from `start` to `end` see some of the keys, those from `diagonal` to `whole` see all.
    start = low // BLOCK_M * BLOCK_M
    diagonal = tl.cdiv(low + BLOCK_N - 1, BLOCK_M) * BLOCK_M
    end = _last_query(lasts, last, WINDOW) + 1
    whole = _last_query(lasts, low, WINDOW) + 2 - BLOCK_M
    k = _rows(key, SHARED, shared, low, tokens, BLOCK_N, D, WIDE, COPY_ENGINE)
    if KEYS:
        v = _rows(value, SHARED, shared, low, tokens, BLOCK_N, D, WIDE, COPY_ENGINE)
        dk = tl.zeros([BLOCK_N, WIDE], tl.float32)
    if VALUES:
        dv = tl.zeros([BLOCK_N, WIDE], tl.float32)
    # One loop over all query heads that share the keys: the loads for the next head start before
    # the last head is done. Tiles of scores have a row for each key: as the left factor of a
    # product, they then stay in registers.
    steps = tl.cdiv(end - start, BLOCK_M)
    for step in tl.range(0, steps * (HEADS // SHARED)):
        member = step // steps
        head = shared * (HEADS // SHARED) + member
        at = start + (step - member * steps) * BLOCK_M
        q = _rows(query, HEADS, head, at, tokens, BLOCK_M, D, WIDE, COPY_ENGINE)
        do = _rows(grad, HEADS, head, at, tokens, BLOCK_M, D, WIDE, COPY_ENGINE)
        log_sum = _numbers(log_sums, head * _padded(tokens) + at, BLOCK_M, COPY_ENGINE)
        if KEYS:
            delta = _numbers(deltas, head * _padded(tokens) + at, BLOCK_M, COPY_ENGINE)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if CAPPED:
            capped = _cap(scores * scale, cap)
            weights = tl.exp2(capped * (cap * LOG2_E) - (log_sum * LOG2_E)[None, :])
        else:
            weights = tl.exp2(scores * (scale * LOG2_E) - (log_sum * LOG2_E)[None, :])
        if (at < diagonal) | (at >= whole):
            index = at + tl.arange(0, BLOCK_M)
            first = tl.load(firsts + index)
            visible = _visible(index[None, :], keys[:, None], first[None, :], WINDOW)
            weights = tl.where(visible, weights, 0.0)
        if VALUES:
            dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
        if KEYS:
            inner = weights * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
            if CAPPED:
                inner = inner * (1.0 - capped * capped)
            dk = tl.dot(inner.to(q.dtype), q, dk, input_precision=PRECISION)
    if KEYS:
        _store_rows(dkey, SHARED, shared, keys, tokens, dk * scale, D, WIDE)
    if VALUES:
        _store_rows(dvalue, SHARED, shared, keys, tokens, dv, D, WIDE)
