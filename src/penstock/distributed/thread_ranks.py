"""Ranks in threads of one process, for tests.

Kernel launches of all threads would share one interpreter lock, so this is not for training.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from penstock.engine.device import Device
from penstock.errors import PeerLostError
from penstock.memory.placement import Place
from penstock.plan.placement import TransportName

WAIT_SECONDS = 120.0
"""How long a rank waits for the others before it gives up."""


class ThreadRanks:
    """A group of ranks. Each thread uses one of `transports`."""

    def __init__(self, world: int, wait_seconds: float = WAIT_SECONDS) -> None:
        self.wait_seconds = wait_seconds
        self.barrier = threading.Barrier(world)
        self.calls: list[tuple[object, object]] = [(None, None)] * world
        """What each rank is calling, and the tensor or message that it passes."""
        self.failed: tuple[int, BaseException] | None = None
        self._lock = threading.Lock()
        self.transports = [ThreadTransport(self, rank, world) for rank in range(world)]

    def fail(self, rank: int, error: BaseException) -> None:
        """Let every rank that waits, or will wait, fail."""
        with self._lock:
            if self.failed is None:
                self.failed = (rank, error)
        self.barrier.abort()


class ThreadTransport:
    """The transport of one rank (a `penstock.engine.transport.Transport`)."""

    memory = None

    def __init__(self, group: ThreadRanks, rank: int, world: int) -> None:
        self._group, self.rank, self.world = group, rank, world

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        """Do nothing: threads have all memory in common already."""

    def gather(self, shards: torch.Tensor) -> None:
        tensors = self._show("gather", shards)
        for rank, tensor in enumerate(tensors):
            if rank != self.rank:
                shards.view(self.world, -1)[rank].copy_(tensor.view(self.world, -1)[rank])
        self._meet()

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        tensors = self._show(f"exchange with {senders} senders", parts)
        for rank, tensor in enumerate(tensors[:senders]):
            into.view(self.world, -1)[rank].copy_(tensor.view(self.world, -1)[self.rank])
        self._meet()

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        tensors = self._show(f"broadcast from {source}", values)
        if source != self.rank:
            values.copy_(tensors[source])
        self._meet()

    def meet(self, message: bytes) -> Sequence[bytes]:
        self._group.calls[self.rank] = (("meet", len(message)), message)
        messages = self._compare()
        self._meet()
        return [bytes(each) for each in messages]  # type: ignore[call-overload]

    def abort(self, error: BaseException) -> None:
        self._group.fail(self.rank, error)

    def _show(self, call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Show a tensor to all ranks; return what they show. They may use it until `_meet`."""
        self._group.calls[self.rank] = ((call, tensor.shape, tensor.dtype), tensor)
        return [each for each in self._compare() if isinstance(each, torch.Tensor)]

    def _compare(self) -> list[object]:
        """Return what the ranks pass, after checking that all of them make the same call."""
        self._meet()
        kinds = [kind for kind, _ in self._group.calls]
        if any(kind != kinds[0] for kind in kinds):
            self._group.fail(self.rank, AssertionError(f"ranks make different calls: {kinds}"))
        return [value for _, value in self._group.calls]

    def _meet(self) -> None:
        with suppress(threading.BrokenBarrierError):
            self._group.barrier.wait(self._group.wait_seconds)
            return
        if self._group.failed is None:
            waited = self._group.wait_seconds
            raise PeerLostError(None, f"a rank did not arrive within {waited:.0f} s")
        rank, error = self._group.failed
        raise PeerLostError(rank, f"{type(error).__name__}: {error}") from error
