"""Ranks whose GPUs reach each other, on torch.distributed with NCCL.

NCCL carries weights and gradients between GPUs. A gloo group carries data in host memory.

NCCL calls are issued on the current CUDA stream, that of the lane `ranks`, and return at once. One
communicator makes all of them in the order of the schedule, which is the same on all ranks: several
communicators at the same time could wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.distributed.gloo_ranks import GlooTransport
from penstock.engine.device import Device
from penstock.errors import PeerLostError
from penstock.memory.placement import Place
from penstock.plan.placement import TransportName

TIMEOUT = timedelta(days=30)
"""Torch ends a process when a call takes longer. A lost rank is noticed by `peer_watch` instead."""


# Torch 2.13 has a new name for it, and warns about the old one.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclTransport:
    """The transport of this process (a `penstock.engine.transport.Transport`).

    All ranks must create theirs at the same time. `control` connects the same ranks by gloo. With
    the backend `gloo` and a CPU in place of a GPU, the same calls run without NCCL.
    """

    memory = None

    def __init__(self, control: GlooTransport, device: Device, *, backend: str = "nccl") -> None:
        self.rank, self.world, self.watch = control.rank, control.world, control.watch
        self._control, self._device = control, device.torch_device
        # Otherwise a thread of torch ends the process when NCCL fails, before the rank that was
        # lost is named.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        on_gpu = self._device if backend == "nccl" else None
        group = dist.new_group(
            control.global_ranks, timeout=TIMEOUT, backend=backend, device_id=on_gpu
        )
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        # A kernel that waits for a lost rank never ends by itself.
        self.watch.on_loss.append(self._end_kernels)

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        """Do nothing: the communicator is open."""

    def gather(self, shards: torch.Tensor) -> None:
        flat = _as_bytes(shards)
        own = flat.view(self.world, -1)[self.rank]  # in place: NCCL allows it, and copies nothing
        self._issue("gather", lambda: _all_gather(flat, own, group=self._group))

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        part = _as_bytes(parts).numel() // self.world
        received = [part * (rank < senders) for rank in range(self.world)]
        sent = [part * (self.rank < senders)] * self.world
        source, target = _as_bytes(parts)[: sum(sent)], _as_bytes(into)[: sum(received)]
        self._issue(
            "exchange",
            lambda: dist.all_to_all_single(target, source, received, sent, group=self._group),
        )

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        self._control.broadcast(values, source)

    def meet(self, message: bytes) -> Sequence[bytes]:
        return self._control.meet(message)

    def abort(self, error: BaseException) -> None:
        self._control.abort(error)
        self._end_kernels()

    def close(self) -> None:
        """Release the communicator. No rank may make another call."""
        self.watch.on_loss.remove(self._end_kernels)
        dist.destroy_process_group(self._group)

    def _issue(self, what: str, start: Callable[[], object]) -> None:
        """Issue a call on the current stream. A rank lost later is noticed in the next call."""
        with self.watch.call(what):
            try:
                start()
            except RuntimeError as error:
                self.watch.explain(error)

    def _end_kernels(self, _: PeerLostError | None = None) -> None:
        with suppress(RuntimeError, AttributeError):  # the process ends soon, one way or another
            self._group._get_backend(self._device).abort()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
