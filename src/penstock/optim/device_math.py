# mypy: ignore-errors
# ruff: noqa: N803
"""Single elements of the GPU's sweep, in Triton. Room: update.

[Note: one rounding] A kernel gives the host's bits if every operation is rounded once, to nearest,
and keeps denormals:

- products and sums: kernels are launched with `enable_fp_fusion=False`, so that the PTX says
  `mul.rn`, `add.rn` and `sub.rn`, which no later stage may contract, and never `.ftz`;
- division and square root: written as PTX, so that no version of Triton has a say in what `div_rn`
  and `sqrt_rn` become. Its interpreter has no PTX; there (`PTX=False`) numpy's are right;
- everything else is integer arithmetic on the bits.

`tests/test_device_code.py` reads the PTX for the first two.
"""

import triton
import triton.language as tl

SIGN = tl.constexpr(0x80000000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
_GRAD_LIMIT = tl.constexpr(0x5F7FFFFF)


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
    """fp32 to fp16, to nearest, ties to even. Adding 0.5 aligns and rounds denormal halves."""
    magnitude = bits_of(x) & MAGNITUDE
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    denormal = bits_of(float_of(magnitude) + 0.5) - 0x3F000000
    special = tl.where(magnitude > INFINITY, 0x7E00, 0x7C00).to(tl.uint32)
    finite = tl.where(magnitude < 0x38800000, denormal, normal)
    found = tl.where(magnitude >= 0x47800000, special, finite)
    return (((bits_of(x) & SIGN) >> 16) | found).to(tl.int16)


@triton.jit
def widen(stored, KIND: tl.constexpr):
    """A gradient as loaded (16 bits as int16) to fp32, exactly."""
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
    """Thirty-two random bits for each element. A tile never straddles 2^32: it is aligned."""
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    high = ((at >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = key0.to(tl.uint32, bitcast=True) ^ (high * 0x9E3779B1)
    x = (low + local.to(tl.uint32)) ^ key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + key1.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return x ^ (x >> 16)
