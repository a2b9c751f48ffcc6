"""Norm and overflow of gradients still in GPU memory: the host's figures, to the bit. Room: update.

`start_stats(...) -> Ticket[GradStats]`, `ticket.wait()`; `grad_stats` does both.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence

import torch

from penstock.optim import reference
from penstock.optim.device_backend import (
    FLOATS,
    DeviceTicket,
    Engine,
    check_tensor,
    kernels,
    on,
    pick,
    raw,
)
from penstock.optim.norms import GradStats
from penstock.optim.sweep import LEAF
from penstock.ticket import Finished, Ticket

_KIND = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NOWHERE = 2**63 - 1

_LEAVES = 8
"""Leaves that one warp sums side by side: 16 bytes of bf16 a thread."""
_LIMB_LEAVES = 128


def grad_stats(
    grads: torch.Tensor | Sequence[torch.Tensor], *, engine: Engine | None = None
) -> GradStats:
    """As `sweep.grad_stats`, for gradients on one GPU; waits for them."""
    tensors = [grads] if isinstance(grads, torch.Tensor) else grads
    return start_stats(tensors, engine=engine).wait()


def start_stats(
    grads: Sequence[torch.Tensor], *, engine: Engine | None = None
) -> Ticket[GradStats]:
    """Queue one read of the gradients on the current stream.

    Triton's takes 8 bytes for every 4096 elements; torch's takes copies, and waits.
    """
    tensors = list(grads)
    for i, tensor in enumerate(tensors):
        check_tensor(f"gradient {i}", tensor, FLOATS, tensors[0].device)
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return Finished(_nothing())
    with on(full[0].device):
        if pick(engine) == "torch":
            done = _by_torch(tensors)
            return DeviceTicket(full[0].device, tensors, lambda: done)
        return DeviceTicket(full[0].device, tensors, _by_triton(tensors))


def _by_triton(grads: Sequence[torch.Tensor]) -> Callable[[], GradStats]:
    norm, device = kernels("norm_kernels"), grads[0].device
    limbs = torch.zeros(norm.NUM_LIMBS, dtype=torch.int64, device=device)
    tops = torch.zeros(len(grads), dtype=torch.int64, device=device)
    bads = torch.full((len(grads),), _NOWHERE, dtype=torch.int64, device=device)
    for i, grad in enumerate(grads):
        n, leaves = grad.numel(), -(-grad.numel() // LEAF)
        if not n:
            continue
        sums = torch.empty(leaves, dtype=torch.float64, device=device)
        norm.leaf_kernel[(-(-leaves // _LEAVES),)](
            *(raw(grad), sums, tops[i:], bads[i:], n),
            GRAD=_KIND[grad.dtype],
            LEAVES=_LEAVES,
            num_warps=1,
            enable_fp_fusion=False,
        )
        norm.limb_kernel[(-(-leaves // _LIMB_LEAVES),)](
            *(sums, limbs, leaves), LEAVES=_LIMB_LEAVES, num_warps=4
        )
    return functools.partial(_read, limbs, tops, bads)


def _read(limbs: torch.Tensor, tops: torch.Tensor, bads: torch.Tensor) -> GradStats:
    units = sum(limb << (32 * i) for i, limb in enumerate(limbs.tolist()))
    max_abs: float = struct.unpack("<f", struct.pack("<I", max(tops.tolist())))[0]
    bad = next(((i, at) for i, at in enumerate(bads.tolist()) if at != _NOWHERE), None)
    return GradStats(units, max_abs, bad)


def _by_torch(grads: Sequence[torch.Tensor]) -> GradStats:
    total = _nothing()
    for i, grad in enumerate(grads):
        if not grad.numel():
            continue
        flat = grad.detach().view(-1).float()
        sums = reference.leaf_sums(grad.detach()).tolist()
        units = sum(_units(s) for s in sums if math.isfinite(s))
        bad = (~torch.isfinite(flat)).nonzero()
        here = (i, int(bad[0])) if bad.numel() else None
        total = total + GradStats(units, float(flat.abs().max()), here)
    return total


def _units(value: float) -> int:
    """A leaf's sum in the units of `GradStats`: a whole number of them."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << 352) // denominator


def _nothing() -> GradStats:
    return GradStats(0, 0.0, None)
