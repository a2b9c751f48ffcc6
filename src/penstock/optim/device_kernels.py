# mypy: ignore-errors
# ruff: noqa: N803
"""The GPU's step in Triton: one kernel for every rule and format. Room: update.

Element for element what `reference` says; `device_math` has the arithmetic and the note on
rounding. Imported by `device_sweep` only where Triton is there.
"""

import triton
import triton.language as tl

from penstock import _native
from penstock.optim.device_math import (
    MAGNITUDE,
    SIGN,
    bits_of,
    blend,
    divide,
    draw,
    float_of,
    gradient,
    half_bits,
    root,
    widen,
)

COLUMNS = tl.constexpr(_native.SWEEP_MOMENT_BLOCK)
_GRID_TOP = tl.constexpr(0x7F7)
_FAR = tl.constexpr(0x7FFFFFFF)


# How masters and moments are stored. A tile is ROWS x COLUMNS, and a row has one base.


@triton.jit
def _load_master(weight, rest, local, mask, MASTER: tl.constexpr):
    if MASTER == "split":
        high = tl.load(weight + local, mask=mask, other=0).to(tl.uint16, bitcast=True)
        low = tl.load(rest + local, mask=mask, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        return float_of((high.to(tl.uint32) << 16) + low)
    elif MASTER == "half":
        return tl.load(rest + local, mask=mask, other=0.0)
    else:
        return tl.load(weight + local, mask=mask, other=0.0)


@triton.jit
def _store_master(weight, rest, local, mask, master, MASTER: tl.constexpr):
    if MASTER == "split":
        bits = bits_of(master)
        high = (bits + 0x8000) >> 16
        tl.store(weight + local, high.to(tl.int16), mask=mask)
        tl.store(rest + local, (bits - (high << 16)).to(tl.int16), mask=mask)
    elif MASTER == "half":
        tl.store(weight + local, half_bits(master), mask=mask)
        tl.store(rest + local, master, mask=mask)
    else:
        tl.store(weight + local, master, mask=mask)


@triton.jit
def _load_moment(
    stored, base, local, mask, row, row_mask, MOMENTS: tl.constexpr, SECOND: tl.constexpr
):
    if MOMENTS == "fp32":
        return tl.load(stored + local, mask=mask, other=0.0)
    elif MOMENTS == "bf16":
        return widen(tl.load(stored + local, mask=mask, other=0), "bf16")
    elif MOMENTS == "int8":
        code = tl.load(stored + local, mask=mask, other=0).to(tl.uint32)
        low = tl.load(base + row, mask=row_mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
        size = code
        sign = code & 0
        if not SECOND:
            size = code & 0x7F
            sign = (code & 0x80) << 24
        return float_of(tl.where(size == 0, 0, (size + low[:, None]) << 20).to(tl.uint32) | sign)
    else:
        return (local * 0).to(tl.float32)


@triton.jit
def _store_moment(
    stored,
    base,
    local,
    mask,
    row,
    row_mask,
    value,
    random16,
    MOMENTS: tl.constexpr,
    SECOND: tl.constexpr,
):
    bits = bits_of(value)
    if MOMENTS == "fp32":
        tl.store(stored + local, value, mask=mask)
    elif MOMENTS == "bf16":
        top = ((bits & MAGNITUDE) + random16) >> 16
        top = tl.where(top > 0x7F7F, 0x7F7F, top).to(tl.uint32)
        tl.store(stored + local, (((bits & SIGN) >> 16) | top).to(tl.int16), mask=mask)
    elif MOMENTS == "int8":
        place = ((bits & MAGNITUDE) + (random16 << 4)) >> 20
        place = tl.where(place > _GRID_TOP, _GRID_TOP, place).to(tl.int32)
        highest = tl.max(tl.where(mask, place, 0), axis=1)
        if SECOND:
            low = tl.where(highest > 255, highest - 255, 0)
            above = place - low[:, None]
            code = tl.where(bits == 0, 0, tl.where(above > 1, above, 1))
        else:
            low = tl.where(highest > 127, highest - 127, 0)
            above = place - low[:, None]
            unit = float_of(((low + 1) << 20).to(tl.uint32)) * 1.52587890625e-05  # 2^-16
            dart = random16.to(tl.int32).to(tl.float32) * unit[:, None]
            under = tl.where(float_of(bits & MAGNITUDE) > dart, 1, 0)
            code = tl.where(above > 0, above, under) | ((bits & SIGN) >> 24).to(tl.int32)
        tl.store(stored + local, code.to(tl.uint8), mask=mask)
        tl.store(base + row, low.to(tl.int16), mask=row_mask)


# The step.


@triton.jit(do_not_specialize=["first_index", "key0", "key1"])
def sweep_kernel(
    grad,
    weight,
    rest,
    first,
    second,
    first_base,
    second_base,
    refused,
    n,
    first_index,
    key0,
    key1,
    scale,
    l2,
    decay,
    rate,
    fresh1,
    fresh2,
    eps,
    keep,
    RULE: tl.constexpr,
    LOOK: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    LIMIT: tl.constexpr,
    MOMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    PTX: tl.constexpr,
):
    """One tile. Pointers to roles that the format lacks are never touched."""
    begin = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    left = n - begin
    row = tl.arange(0, ROWS)
    local = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = local < left
    row_mask = row * COLUMNS < left
    grad += begin
    weight += begin
    rest += begin
    first += begin
    second += begin
    first_base += begin // COLUMNS
    second_base += begin // COLUMNS

    master = _load_master(weight, rest, local, mask, MASTER)
    old1 = _load_moment(first, first_base, local, mask, row, row_mask, MOMENTS, False)
    raw = widen(tl.load(grad + local, mask=mask, other=0), GRAD)
    g = gradient(raw, master, scale, l2)
    old2 = old1
    new2 = old1
    if RULE == "adamw":
        old2 = _load_moment(second, second_base, local, mask, row, row_mask, MOMENTS, True)
        new1 = blend(old1, g, fresh1)
        new2 = blend(old2, g * g, fresh2)
        toward = divide(new1, root(new2, PTX) + eps, PTX) * rate
    elif RULE == "sgd":
        new1 = old1 * keep + g * fresh1
        toward = (g + new1 * keep) * rate if LOOK else new1 * rate
    else:
        lean = blend(old1, g, fresh1)
        # Zero leans nowhere, and NaN stays NaN. Not a minus: Triton's is 0 - x, which loses -0.
        ahead = tl.where((lean > 0) | (lean < 0), rate, lean)
        toward = tl.where(lean < 0, ahead * -1.0, ahead)
        new1 = blend(old1, g, fresh2)
    stepped = master - (toward + master * decay)

    bad = (bits_of(stepped) & MAGNITUDE) > LIMIT
    _store_master(weight, rest, local, mask, tl.where(bad, master, stepped), MASTER)
    random = draw(first_index + begin, local, key0, key1)
    new1 = tl.where(bad, old1, new1)
    _store_moment(first, first_base, local, mask, row, row_mask, new1, random >> 16, MOMENTS, False)
    if RULE == "adamw":
        new2 = tl.where(bad, old2, new2)
        _store_moment(
            second, second_base, local, mask, row, row_mask, new2, random & 0xFFFF, MOMENTS, True
        )
    earliest = tl.min(tl.min(tl.where(bad & mask, local, _FAR), axis=1), axis=0)
    if earliest < _FAR:
        tl.atomic_min(refused, begin + earliest)
