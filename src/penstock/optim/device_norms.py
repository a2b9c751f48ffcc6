"""Norm and overflow of gradients in GPU memory, bit for bit the same as on the host.

`start_stats(...)` returns a `Ticket[GradStats]`; `grad_stats` also waits for it.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch

from penstock.optim import reference
from penstock.optim.device_backend import (
    FLOATS,
    Backend,
    DeviceTicket,
    check_tensor,
    choose_backend,
    load_kernels,
    raw_bits,
    use_device,
)
from penstock.optim.norms import GradStats
from penstock.optim.sweep import LEAF
from penstock.ticket import Finished, Ticket

Numbers = TypeVar("Numbers", torch.Tensor, list[int])

_KIND = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NOWHERE = 2**63 - 1

_LEAVES = 8
"""Number of leaves that one program, a warp, sums concurrently: 16 bytes of bf16 per thread."""
_LIMB_LEAVES = 128


def grad_stats(
    grads: torch.Tensor | Sequence[torch.Tensor], *, backend: Backend | None = None
) -> GradStats:
    """Return the stats of gradients on one GPU, like `sweep.grad_stats`."""
    tensors = [grads] if isinstance(grads, torch.Tensor) else grads
    return start_stats(tensors, backend=backend).wait()


def start_stats(
    grads: Sequence[torch.Tensor], *, backend: Backend | None = None
) -> Ticket[GradStats]:
    """Queue one read of the gradients on the current stream.

    The Triton kernels need 8 bytes of memory for every 4096 elements. The torch fallback needs
    temporary copies, and blocks. The ticket does not keep the gradients alive: a tensor of the
    current stream may be freed as soon as this returns, because the allocator reuses its memory in
    the order of the stream.
    """
    tensors = list(grads)
    for i, tensor in enumerate(tensors):
        check_tensor(f"gradient {i}", tensor, FLOATS, tensors[0].device)
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return Finished(_no_stats())
    with use_device(full[0].device):
        if choose_backend(backend) == "torch":
            return Finished(_run_torch(tensors))
        return _run_triton(tensors)


def _run_triton(grads: Sequence[torch.Tensor]) -> Ticket[GradStats]:
    norm, device = load_kernels("norm_kernels"), grads[0].device
    numbers = torch.zeros(norm.NUM_LIMBS + 2 * len(grads), dtype=torch.int64, device=device)
    limbs, tops, bads = _parts(numbers, len(grads))
    bads.fill_(_NOWHERE)
    at = 0
    for dtype, same in itertools.groupby(grads, lambda grad: grad.dtype):
        some = list(same)
        first = next((g for g in some if g.numel()), None)
        if first is not None:
            begins = (g.data_ptr() - first.data_ptr() if g.numel() else 0 for g in some)
            layout = _layout(
                tuple(begin // dtype.itemsize for begin in begins),
                tuple(g.numel() for g in some), device,
            )  # fmt: skip
            sums = torch.empty(layout.leaves, dtype=torch.float64, device=device)
            norm.leaf_kernel[(layout.programs,)](
                *(raw_bits(first), layout.parts, sums, tops[at:], bads[at:]),
                GRAD=_KIND[dtype],
                LEAVES=_LEAVES,
                PARTS=layout.parts.shape[1],
                ALIGNED=layout.aligned,
                num_warps=1,
                enable_fp_fusion=False,
            )
            norm.limb_kernel[(-(-layout.leaves // _LIMB_LEAVES),)](
                *(sums, limbs, layout.leaves),
                LEAVES=_LIMB_LEAVES,
                num_warps=4,
                enable_fp_fusion=False,
            )
        at += len(some)
    return DeviceTicket(device, (), numbers, functools.partial(_read, len(grads)))


class _Layout(NamedTuple):
    """How the leaves of several tensors are distributed over the programs of one launch.

    One launch for each tensor would not keep a GPU busy: a small tensor takes as long as a few
    programs take one after the other, and a large one has too few programs.
    """

    parts: torch.Tensor
    """The table that `norm_kernels.leaf_kernel` reads."""
    programs: int
    leaves: int
    aligned: bool
    """Whether all tensors begin and end at multiples of eight elements, relative to the first."""


# Tensors of a block have the same sizes and distances at every step, and layers have those of each
# other, so there are few layouts. A new one is copied to the device.
@functools.lru_cache(maxsize=256)
def _layout(begins: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> _Layout:
    rows: list[tuple[int, int, int, int]] = []
    programs = leaves = 0
    for begin, n in zip(begins, numels, strict=True):
        rows.append((programs, begin, n, leaves))
        programs += -(-n // (LEAF * _LEAVES))
        leaves += -(-n // LEAF)
    unused = (programs, 0, 0, 0)
    rows += [unused] * ((1 << (len(rows) - 1).bit_length()) - len(rows))
    parts = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)
    return _Layout(parts, programs, leaves, all(each % 8 == 0 for each in (*begins, *numels)))


def _parts(numbers: Numbers, grads: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return what the kernels write: the limbs of the sum, and two numbers per tensor.

    These are the bits of its largest magnitude, and the index of its first element that is not
    finite.
    """
    return numbers[: -2 * grads], numbers[-2 * grads : -grads], numbers[-grads:]


def _read(grads: int, numbers: list[int]) -> GradStats:
    """Return the stats of `grads` tensors from what the kernels wrote."""
    limbs, tops, bads = _parts(numbers, grads)
    units = sum(limb << (32 * i) for i, limb in enumerate(limbs))
    max_abs: float = struct.unpack("<f", struct.pack("<I", max(tops)))[0]
    bad = next(((i, at) for i, at in enumerate(bads) if at != _NOWHERE), None)
    return GradStats(units, max_abs, bad)


def _run_torch(grads: Sequence[torch.Tensor]) -> GradStats:
    total = _no_stats()
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
    """Convert the sum of a leaf to the units of `GradStats`, which is exact."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << 352) // denominator


def _no_stats() -> GradStats:
    return GradStats(0, 0.0, None)
