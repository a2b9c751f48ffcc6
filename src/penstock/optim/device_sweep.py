"""The sweep for states in GPU memory: the host's bits. Room: update.

`start(...) -> DeviceTicket` takes the segments of `sweep.start`, with all tensors on one CUDA
device, refuses the same inputs and gives the same bits: a state may move between sides freely.
Kernels are queued on the current stream, one for each segment, and only `wait` waits for them.
`device_engine` says what runs where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError
from penstock.optim import reference
from penstock.optim.device_backend import (
    Engine,
    buffers,
    check_segments,
    interpreted,
    kernels,
    on,
    pick,
    raw,
    record,
)
from penstock.optim.device_norms import StatsTicket, grad_stats, start_stats
from penstock.optim.norms import GradStats
from penstock.optim.rules import RuleName
from penstock.optim.sweep import Segment

_GRAD = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MASTER = {torch.bfloat16: "split", torch.float16: "half", torch.float32: "single"}
_MOMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "int8"}
_NOWHERE = 2**63 - 1

_ROWS = 4
"""Rows of one base each in a kernel's tile: with four warps, eight elements a thread."""
_TILE = _ROWS * _native.SWEEP_MOMENT_BLOCK


class DeviceTicket:
    """A step under way. It keeps the tensors; `wait` may be called again."""

    def __init__(
        self, segments: Sequence[Segment], refused: torch.Tensor | None, stats: StatsTicket | None
    ) -> None:
        self._segments, self._refused, self._stats = tuple(segments), refused, stats
        self._event = record(segments[0].grad.device) if segments else None

    @property
    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> GradStats | None:
        """Returns when all is written: the gradients' stats, if they were asked for.

        Raises NonFiniteMasterError if an element was refused.
        """
        if self._event is not None:
            self._event.synchronize()
        refused = [] if self._refused is None else self._refused.tolist()
        for segment, at in zip(self._segments, refused, strict=True):
            if at != _NOWHERE:
                raise NonFiniteMasterError(segment.name, segment.first_index + at)
        return None if self._stats is None else self._stats.wait()


def start(
    rule: RuleName,
    segments: Sequence[Segment],
    *,
    stats: bool = False,
    engine: Engine | None = None,
) -> DeviceTicket:
    """Queue one step. Formats may differ between segments. `stats` reads the gradients once more.

    The caller keeps the tensors' memory from being reused by other streams until `wait`.
    """
    if not segments:
        return DeviceTicket((), None, start_stats(()) if stats else None)
    check_segments(rule, segments)
    run = _by_triton if pick(engine) == "triton" else _by_torch
    device = segments[0].grad.device
    with on(device):
        found = start_stats([s.grad for s in segments], engine=engine) if stats else None
        refused = torch.full((len(segments),), _NOWHERE, dtype=torch.int64, device=device)
        for i, segment in enumerate(segments):
            if segment.grad.numel():
                run(rule, segment, refused[i:])
        return DeviceTicket(segments, refused, found)


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


__all__ = ["DeviceTicket", "StatsTicket", "grad_stats", "start", "start_stats"]
