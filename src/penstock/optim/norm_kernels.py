# mypy: ignore-errors
# ruff: noqa: N803
"""Triton kernels for the norm and overflow of gradients.

They add in the same order as the host. `device_norms` imports this module only if Triton is
installed.
"""

import triton
import triton.language as tl

from penstock import _native
from penstock.optim.device_kernels import INFINITY, MAGNITUDE, bits_of, widen

NUM_LIMBS = 21
"""Number of limbs, the same as in `ExactSum` of the native core."""

_LEAF = tl.constexpr(_native.SWEEP_LEAF)
_LANES = tl.constexpr(_native.SWEEP_LANES)
_LIMBS = tl.constexpr(NUM_LIMBS)
_LIMB_ROOM = tl.constexpr(32)
_FAR = tl.constexpr(0x7FFFFFFF)
_NARROW_LEAST = tl.constexpr(0x27800000)  # 2^-48 and 2^48 as bits: see `reference.leaf_sums`
_NARROW_MOST = tl.constexpr(0x57800000)


@triton.jit
def square(grad, at, left, GRAD: tl.constexpr):
    """Return the squares of one row of each leaf, and the bits of its magnitudes."""
    x = widen(tl.load(grad + at, mask=at < left, other=0), GRAD)
    return x * x, (bits_of(x) & MAGNITUDE).to(tl.int32)


@triton.jit
def narrow_sums(grad, local, left, tops, GRAD: tl.constexpr, LEAVES: tl.constexpr):
    """Add four rows at a time in fp32, where squares of 16-bit numbers are exact."""
    sums = tl.zeros([LEAVES, _LANES], dtype=tl.float64)
    for i in tl.range(0, _LEAF, 4 * _LANES):
        a, top_a = square(grad, local + i, left, GRAD)
        b, top_b = square(grad, local + i + _LANES, left, GRAD)
        c, top_c = square(grad, local + i + 2 * _LANES, left, GRAD)
        d, top_d = square(grad, local + i + 3 * _LANES, left, GRAD)
        sums += ((a + b) + (c + d)).to(tl.float64)
        tops = tl.maximum(tops, tl.maximum(tl.maximum(top_a, top_b), tl.maximum(top_c, top_d)))
    return sums, tops


@triton.jit
def wide_sums(grad, local, left, tops, GRAD: tl.constexpr, LEAVES: tl.constexpr):
    """Add all rows in fp64, where squares of fp32 numbers are exact."""
    sums = tl.zeros([LEAVES, _LANES], dtype=tl.float64)
    for i in tl.range(0, _LEAF, _LANES, loop_unroll_factor=4):
        x = widen(tl.load(grad + local + i, mask=local + i < left, other=0), GRAD)
        wide = x.to(tl.float64)
        sums += wide * wide
        tops = tl.maximum(tops, (bits_of(x) & MAGNITUDE).to(tl.int32))
    return sums, tops


@triton.jit
def fold(sums, LEAVES: tl.constexpr):
    """Add halves to halves: two numbers at a time, so that the order is fully specified."""
    half = tl.sum(tl.reshape(sums, [LEAVES, 2, _LANES // 2]), axis=1)
    half = tl.sum(tl.reshape(half, [LEAVES, 2, _LANES // 4]), axis=1)
    half = tl.sum(tl.reshape(half, [LEAVES, 2, _LANES // 8]), axis=1)
    half = tl.sum(tl.reshape(half, [LEAVES, 2, _LANES // 16]), axis=1)
    return tl.sum(half, axis=1)


@triton.jit
def leaf_kernel(
    grad,
    parts,
    leaf_sums,
    top_bits,
    first_bad,
    GRAD: tl.constexpr,
    LEAVES: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute the sums of squares of LEAVES leaves of one tensor, each in the specified order.

    `parts` has PARTS entries in each of four rows, one for each tensor: its first program, where it
    begins relative to `grad`, its number of elements, and its first leaf. Unused entries have a
    first program that does not exist. With ALIGNED, tensors begin and end at multiples of eight
    elements.
    """
    program = tl.program_id(0).to(tl.int64)
    first_programs = tl.load(parts + tl.arange(0, PARTS))
    part = tl.sum((first_programs <= program).to(tl.int32), axis=0) - 1
    first_leaf = (program - tl.load(parts + part)) * LEAVES
    begin = tl.load(parts + PARTS + part)
    n = tl.load(parts + 2 * PARTS + part)
    if ALIGNED:  # otherwise the compiler loads one element at a time
        begin, n = tl.multiple_of(begin, 8), tl.multiple_of(n, 8)
    leaf_sums += tl.load(parts + 3 * PARTS + part)
    leaf = tl.arange(0, LEAVES)
    lane = tl.arange(0, _LANES)
    left = n - first_leaf * _LEAF
    grad += begin + first_leaf * _LEAF
    local = leaf[:, None] * _LEAF + lane[None, :]
    none = tl.zeros([LEAVES, _LANES], dtype=tl.int32)
    if GRAD == "fp32":
        sums, tops = wide_sums(grad, local, left, none, GRAD, LEAVES)
        total = fold(sums, LEAVES)
    else:
        sums, tops = narrow_sums(grad, local, left, none, GRAD, LEAVES)
        total = fold(sums, LEAVES)
        tallest = tl.max(tops, axis=1)
        narrow = (tallest == 0) | ((tallest >= _NARROW_LEAST) & (tallest < _NARROW_MOST))
        if tl.min(narrow.to(tl.int32), axis=0) == 0:
            again, _ = wide_sums(grad, local, left, none, GRAD, LEAVES)
            total = tl.where(narrow, total, fold(again, LEAVES))
    tl.store(leaf_sums + first_leaf + leaf, total, mask=leaf * _LEAF < left)
    top = tl.max(tl.max(tops, axis=1), axis=0)
    tl.atomic_max(top_bits + part, top.to(tl.int64))
    if top >= INFINITY:
        where = tl.zeros([LEAVES, _LANES], dtype=tl.int32) + _FAR
        for i in range(0, _LEAF, _LANES):
            x = widen(tl.load(grad + local + i, mask=local + i < left, other=0), GRAD)
            bad = (bits_of(x) & MAGNITUDE) >= INFINITY
            where = tl.minimum(where, tl.where(bad, local + i, _FAR))
        earliest = tl.min(tl.min(where, axis=1), axis=0)
        tl.atomic_min(first_bad + part, first_leaf * _LEAF + earliest)


@triton.jit
def limb_kernel(leaf_sums, limbs, num_leaves, LEAVES: tl.constexpr):
    """Add leaf sums as integers, without rounding, so that neither order nor atomics matter.

    Limb i counts units of 2^(32 i - 352). Leaves that are not finite are skipped. Both are the
    same in the native core.
    """
    at = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    bits = tl.load(leaf_sums + at, mask=at < num_leaves, other=0.0).to(tl.int64, bitcast=True)
    exponent = bits >> 52
    usable = (exponent > 0) & (exponent < 0x7FF)
    mantissa = tl.where(usable, (bits & 0xFFFFFFFFFFFFF) | 0x10000000000000, 0)
    shift = tl.where(usable, exponent - 723, 0)
    limb = shift >> 5
    low = (mantissa & 0xFFFFFFFF) << (shift & 31)
    high = (mantissa >> 32) << (shift & 31)
    place = tl.arange(0, _LIMB_ROOM)
    apart = place[None, :] - limb[:, None]
    part = tl.where(apart == 0, (low & 0xFFFFFFFF)[:, None], 0)
    part = tl.where(apart == 1, ((low >> 32) + (high & 0xFFFFFFFF))[:, None], part)
    part = tl.where(apart == 2, (high >> 32)[:, None], part)
    total = tl.sum(part, axis=0)
    tl.atomic_add(limbs + place, total, mask=(place < _LIMBS) & (total != 0))
