"""The sweep for states in GPU memory: the host's bits. Room: update.

`start(...) -> Ticket` takes the segments of `sweep.start`, with all tensors on one CUDA
device, refuses the same inputs and gives the same bits: a state may move between sides freely.
Kernels are queued on the current stream, one for each segment, and only `wait` waits for them.
`device_engine` says what runs where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError
from penstock.optim import reference
from penstock.optim.device_backend import (
    DeviceTicket,
    Engine,
    buffers,
    check_segments,
    interpreted,
    kernels,
    on,
    pick,
    raw,
)
from penstock.optim.device_norms import grad_stats, start_stats
from penstock.optim.norms import GradStats
from penstock.optim.rules import RuleName
from penstock.optim.sweep import Segment
from penstock.ticket import Finished, Ticket

_GRAD = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MASTER = {torch.bfloat16: "split", torch.float16: "half", torch.float32: "single"}
_MOMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "int8"}
_NOWHERE = 2**63 - 1

_ROWS = 4
"""Rows of one base each in a kernel's tile: with four warps, eight elements a thread."""
_TILE = _ROWS * _native.SWEEP_MOMENT_BLOCK


def start(
    rule: RuleName,
    segments: Sequence[Segment],
    *,
    stats: bool = False,
    engine: Engine | None = None,
) -> Ticket[GradStats | None]:
    """Queue one step. Formats may differ between segments. `stats` reads the gradients once more.

    The caller keeps the tensors' memory from being reused by other streams until `wait`.
    """
    if not segments:
        return Finished(start_stats(()).wait() if stats else None)
    check_segments(rule, segments)
    run = _by_triton if pick(engine) == "triton" else _by_torch
    device = segments[0].grad.device
    with on(device):
        found = start_stats([s.grad for s in segments], engine=engine) if stats else None
        refused = torch.full((len(segments),), _NOWHERE, dtype=torch.int64, device=device)
        for i, segment in enumerate(segments):
            if segment.grad.numel():
                run(rule, segment, refused[i:])
        return DeviceTicket(device, segments, partial(_read, tuple(segments), refused, found))


def _read(
    segments: Sequence[Segment], refused: torch.Tensor, stats: Ticket[GradStats] | None
) -> GradStats | None:
    """Return the gradients' stats once the kernels have ended.

    Raises NonFiniteMasterError if an element was refused.
    """
    for segment, at in zip(segments, refused.tolist(), strict=True):
        if at != _NOWHERE:
            raise NonFiniteMasterError(segment.name, segment.first_index + at)
    return None if stats is None else stats.wait()


def _by_triton(rule: RuleName, s: Segment, refused: torch.Tensor) -> None:
    n, by = s.grad.numel(), s.by
    # A role that the format lacks is never touched; any pointer will do.
    roles = [raw(s.grad if tensor is None else tensor) for _, tensor in buffers(s)]
    kernels("device_kernels").sweep_kernel[(-(-n // _TILE),)](
        *(raw(s.grad), *roles, refused),
        *(n, s.first_index, _signed(s.key), _signed(s.key >> 32)),
        *(by.scale, by.l2, by.decay, by.rate, by.fresh1, by.fresh2, by.eps, by.keep),
        RULE=rule,
        LOOK=bool(by.look),
        GRAD=_GRAD[s.grad.dtype],
        MASTER=_MASTER[s.weight.dtype],
        LIMIT=reference.WEIGHT_LIMIT[s.weight.dtype],
        MOMENTS="none" if s.first is None else _MOMENTS[s.first.dtype],
        ROWS=_ROWS,
        PTX=not interpreted(),
        num_warps=4,
        enable_fp_fusion=False,  # see the note on rounding in device_math
    )


def _signed(word: int) -> int:
    """The low 32 bits as an int32, so that no kernel is compiled anew for large ones."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def _by_torch(rule: RuleName, s: Segment, refused: torch.Tensor) -> None:
    state = {role: t.detach().view(-1) for role, t in buffers(s) if t is not None}
    grad = s.grad.detach().view(-1)
    at = reference.sweep(rule, state, grad, s.by, key=s.key, first_index=s.first_index)
    if at is not None:
        refused[:1] = at


__all__ = ["grad_stats", "start", "start_stats"]
