"""The optimizer sweep on the GPU, bit for bit the same as on the CPU.

`start(...)` accepts the same segments as `sweep.start`, with all tensors on one CUDA device. It
rejects the same inputs and gives the same bits, so a state may move between CPU and GPU. Kernels
are queued on the current stream, one for each segment, and only `wait` blocks. `device_backend`
chooses what runs if there is no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from penstock import _native
from penstock.errors import NonFiniteMasterError
from penstock.optim import reference
from penstock.optim.device_backend import (
    Backend,
    DeviceTicket,
    buffers,
    check_segments,
    choose_backend,
    is_interpreted,
    load_kernels,
    raw_bits,
    use_device,
)
from penstock.optim.device_norms import grad_stats, start_stats
from penstock.optim.norms import GradStats
from penstock.optim.rules import RuleName
from penstock.optim.sweep import Constants, Segment
from penstock.ticket import Finished, Ticket

_GRAD = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MASTER = {torch.bfloat16: "split", torch.float16: "half", torch.float32: "single"}
_MOMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "int8"}
_NOWHERE = 2**63 - 1

_ROWS = 4
"""Number of rows in a kernel's tile, each with one base: eight elements per thread with four
warps."""
_TILE = _ROWS * _native.SWEEP_MOMENT_BLOCK


class PreparedDeviceSweep:
    """Segments on one CUDA device that were checked once: `sweep.PreparedSweep` for the GPU."""

    def __init__(
        self, rule: RuleName, segments: Sequence[Segment], *, backend: Backend | None = None
    ) -> None:
        self.rule, self.segments, self._backend = rule, tuple(segments), backend
        if not segments:
            return
        check_segments(rule, segments)
        self._device = segments[0].grad.device
        uses_triton = choose_backend(backend) == "triton"
        self._run = _run_triton if uses_triton else _run_torch
        # The kernel never accesses roles that the format lacks, so any pointer will do for them.
        self._data = [
            [raw_bits(s.grad), *(raw_bits(s.grad if t is None else t) for _, t in buffers(s))]
            for s in self.segments
        ]

    def start(
        self, constants: Sequence[Constants] | None = None, *, stats: bool = False
    ) -> Ticket[GradStats | None]:
        """Queue one step as `start` does, by default with the constants of the segments."""
        if not self.segments:
            return Finished(start_stats(()).wait() if stats else None)
        if constants is None:
            constants = [(s.by, s.key) for s in self.segments]
        with use_device(self._device):
            grads = [s.grad for s in self.segments]
            found = start_stats(grads, backend=self._backend) if stats else None
            refused = torch.full((len(grads),), _NOWHERE, dtype=torch.int64, device=self._device)
            for i, segment in enumerate(self.segments):
                if segment.grad.numel():
                    self._run(self.rule, segment, self._data[i], constants[i], refused[i:])
            read = partial(_read, self.segments, found)
            return DeviceTicket(self._device, self.segments, refused, read)


def start(
    rule: RuleName,
    segments: Sequence[Segment],
    *,
    stats: bool = False,
    backend: Backend | None = None,
) -> Ticket[GradStats | None]:
    """Queue one step on the current stream. Segments may have different formats.

    With `stats`, the gradients are read once more for their norm. The caller must keep the memory
    of the tensors from being reused by other streams until `wait` returns.
    """
    return PreparedDeviceSweep(rule, segments, backend=backend).start(stats=stats)


def _read(
    segments: Sequence[Segment], stats: Ticket[GradStats] | None, refused: list[int]
) -> GradStats | None:
    """Return the gradients' stats once the kernels have ended.

    Raises NonFiniteMasterError if an element was refused.
    """
    for segment, at in zip(segments, refused, strict=True):
        if at != _NOWHERE:
            raise NonFiniteMasterError(segment.name, segment.first_index + at)
    return None if stats is None else stats.wait()


def _run_triton(
    rule: RuleName, s: Segment, data: Sequence[torch.Tensor], constants: Constants,
    refused: torch.Tensor,
) -> None:  # fmt: skip
    n, (by, key) = s.grad.numel(), constants
    load_kernels("device_kernels").sweep_kernel[(-(-n // _TILE),)](
        *(*data, refused),
        *(n, s.first_index, _signed(key), _signed(key >> 32)),
        *(by.scale, by.l2, by.decay, by.rate, by.fresh1, by.fresh2, by.eps, by.keep),
        RULE=rule,
        LOOK=bool(by.look),
        GRAD=_GRAD[s.grad.dtype],
        MASTER=_MASTER[s.weight.dtype],
        LIMIT=reference.WEIGHT_LIMIT[s.weight.dtype],
        MOMENTS="none" if s.first is None else _MOMENTS[s.first.dtype],
        ROWS=_ROWS,
        PTX=not is_interpreted(),
        num_warps=4,
        enable_fp_fusion=False,  # see the note on rounding in device_kernels
    )


def _signed(word: int) -> int:
    """Return the low 32 bits as an int32, so that Triton does not recompile for large values."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def _run_torch(
    rule: RuleName, s: Segment, data: Sequence[torch.Tensor], constants: Constants,
    refused: torch.Tensor,
) -> None:  # fmt: skip
    by, key = constants
    state = {role: t.detach().view(-1) for role, t in buffers(s) if t is not None}
    grad = s.grad.detach().view(-1)
    at = reference.sweep(rule, state, grad, by, key=key, first_index=s.first_index)
    if at is not None:
        refused[:1] = at


__all__ = ["PreparedDeviceSweep", "grad_stats", "start", "start_stats"]
