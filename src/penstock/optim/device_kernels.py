# mypy: ignore-errors
# ruff: noqa: N803
"""The Triton kernel of the optimizer sweep: one kernel for every rule and format.

It computes what `reference` specifies, element for element. `device_sweep` imports this module only
if Triton is installed.

[Note: rounding] A kernel gives the same bits as the host if every operation rounds once, to
nearest, and keeps denormals:

- Products and sums: kernels are launched with `enable_fp_fusion=False`, so that the PTX contains
  `mul.rn`, `add.rn` and `sub.rn`, which no later stage may contract, and never `.ftz`.
- Division and square root are written as PTX, so that they do not depend on how a version of Triton
  compiles `div_rn` and `sqrt_rn`. Triton's interpreter has no PTX; there (`PTX=False`), numpy
  rounds correctly.
- Everything else is integer arithmetic on the bits.

`tests/optim/test_device_code.py` checks the PTX for the first two.
"""

import triton
import triton.language as tl

from penstock import _native

COLUMNS = tl.constexpr(_native.SWEEP_MOMENT_BLOCK)
SIGN = tl.constexpr(0x80000000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
_GRAD_LIMIT = tl.constexpr(0x5F7FFFFF)
_GRID_TOP = tl.constexpr(0x7F7)
_FAR = tl.constexpr(0x7FFFFFFF)


# Arithmetic of single elements.


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def divide(x, y, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(x, y)


@triton.jit
def root(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt_rn(x)


@triton.jit
def half_bits(x):
    """Convert fp32 to fp16, to nearest, ties to even.

    Adding 0.5 aligns and rounds denormal results.
    """
    magnitude = bits_of(x) & MAGNITUDE
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    denormal = bits_of(float_of(magnitude) + 0.5) - 0x3F000000
    special = tl.where(magnitude > INFINITY, 0x7E00, 0x7C00).to(tl.uint32)
    finite = tl.where(magnitude < 0x38800000, denormal, normal)
    found = tl.where(magnitude >= 0x47800000, special, finite)
    return (((bits_of(x) & SIGN) >> 16) | found).to(tl.int16)


@triton.jit
def widen(stored, KIND: tl.constexpr):
    """Convert a gradient as loaded (16-bit types as int16) to fp32, exactly."""
    if KIND == "fp32":
        return stored
    elif KIND == "bf16":
        return float_of(stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        wide = stored.to(tl.uint16, bitcast=True).to(tl.uint32)
        shifted = (wide & 0x7FFF) << 13
        finite = bits_of(float_of(shifted) * 5192296858534827628530496329220096.0)  # 2^112
        magnitude = tl.where(shifted >= 0x0F800000, shifted | INFINITY, finite)
        return float_of(magnitude | ((wide & 0x8000) << 16))


@triton.jit
def blend(old, fresh, share):
    return old + (fresh - old) * share


@triton.jit
def gradient(raw, master, scale, l2):
    scaled = raw * scale
    bits = bits_of(tl.where(l2 == 0, scaled, scaled + master * l2))
    magnitude = bits & MAGNITUDE
    bounded = tl.where(magnitude > _GRAD_LIMIT, _GRAD_LIMIT, magnitude).to(tl.uint32)
    bounded = tl.where(magnitude > INFINITY, magnitude, bounded)
    return float_of(bounded | (bits & SIGN))


@triton.jit
def draw(at, local, key0, key1):
    """Return 32 random bits per element. Tiles are aligned, so none crosses a multiple of 2^32."""
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    high = ((at >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = key0.to(tl.uint32, bitcast=True) ^ (high * 0x9E3779B1)
    x = (low + local.to(tl.uint32)) ^ key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + key1.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return x ^ (x >> 16)


# Loading and storing of masters and moments. A tile is ROWS x COLUMNS, and each row has one base.


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


# The kernel.


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
    """Update one tile. Pointers to roles that the format lacks are never accessed."""
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
    elif RULE == "lion":
        lean = blend(old1, g, fresh1)
        # Zero and NaN stay as they are. Multiply by -1: Triton computes -x as 0 - x, which loses
        # the sign of zero.
        ahead = tl.where((lean > 0) | (lean < 0), rate, lean)
        toward = tl.where(lean < 0, ahead * -1.0, ahead)
        new1 = blend(old1, g, fresh2)
    else:
        tl.static_assert(False, "sweep_kernel has no step for this rule")
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
    else:
        # These rules have one moment. A rule with two must store its second one above.
        tl.static_assert(RULE == "sgd" or RULE == "lion", "store this rule's second moment")
    earliest = tl.min(tl.min(tl.where(bad & mask, local, _FAR), axis=1), axis=0)
    if earliest < _FAR:
        tl.atomic_min(refused, begin + earliest)
