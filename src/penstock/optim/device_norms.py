"""Norm and overflow of gradients still in GPU memory: the host's figures, to the bit. Room: update.

`start_stats(...) -> StatsTicket`, `ticket.wait()`; `grad_stats` does both.
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
    Engine,
    check_tensor,
    kernels,
    on,
    pick,
    raw,
    record,
)
from penstock.optim.norms import GradStats
from penstock.optim.sweep import LEAF

_KIND = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NOWHERE = 2**63 - 1

_LEAVES = 8
"""Leaves that one warp sums side by side: 16 bytes of bf16 a thread."""
_LIMB_LEAVES = 128


class StatsTicket:
    """Stats under way. It keeps the gradients; `wait` may be called again."""

    def __init__(self, grads: Sequence[torch.Tensor], read: Callable[[], GradStats]) -> None:
        self._grads, self._read = tuple(grads), read
        self._event = record(grads[0].device) if grads else None

    @property
    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> GradStats:
        if self._event is not None:
            self._event.synchronize()
        return self._read()


def grad_stats(
    grads: torch.Tensor | Sequence[torch.Tensor], *, engine: Engine | None = None
) -> GradStats:
    """As `sweep.grad_stats`, for gradients on one GPU; waits for them."""
    tensors = [grads] if isinstance(grads, torch.Tensor) else grads
    return start_stats(tensors, engine=engine).wait()


def start_stats(grads: Sequence[torch.Tensor], *, engine: Engine | None = None) -> StatsTicket:
    """Queue one read of the gradients on the current stream.

    Triton's takes 8 bytes for every 4096 elements; torch's takes copies, and waits.
    """
    tensors = list(grads)
    for i, tensor in enumerate(tensors):
        check_tensor(f"gradient {i}", tensor, FLOATS, tensors[0].device)
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return StatsTicket((), _nothing)
    with on(full[0].device):
        if pick(engine) == "torch":
            done = _by_torch(tensors)
            return StatsTicket(tensors, lambda: done)
        return StatsTicket(tensors, _by_triton(tensors))


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
