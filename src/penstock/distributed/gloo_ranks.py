"""Ranks in processes, on torch.distributed with gloo, for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from penstock.distributed.peer_watch import PeerWatch
from penstock.engine.device import Device
from penstock.memory.placement import Place
from penstock.plan.placement import TransportName


class GlooTransport:
    """The transport of this process (a `penstock.engine.transport.Transport`).

    Everything is sent as bytes: gloo does not know every type, and never does arithmetic here.
    Ranks are numbered within `group`, a process group of torch.distributed with the backend gloo,
    and `watch` watches the same ranks.
    """

    memory = None

    def __init__(self, watch: PeerWatch, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None else group
        assert group is not None, "call torch.distributed.init_process_group first"
        self._group = group
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        assert (self.rank, self.world) == (watch.rank, watch.world)
        self.global_ranks = dist.get_process_group_ranks(self._group)
        """The ranks of the group, as torch.distributed numbers all processes."""
        self.watch = watch

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        """Do nothing: the group is connected."""

    def gather(self, shards: torch.Tensor) -> None:
        parts = list(_as_bytes(shards).view(self.world, -1))
        own = parts[self.rank]
        self._run("gather", lambda: dist.all_gather(parts, own, group=self._group, async_op=True))

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        part = _as_bytes(parts).numel() // self.world
        received = [part * (rank < senders) for rank in range(self.world)]
        sent = [part * (self.rank < senders)] * self.world
        source, target = _as_bytes(parts)[: sum(sent)], _as_bytes(into)[: sum(received)]
        self._run(
            "exchange",
            lambda: dist.all_to_all_single(
                target, source, received, sent, group=self._group, async_op=True
            ),
        )

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        flat = _as_bytes(values)
        self._run(
            "broadcast",
            lambda: dist.broadcast(flat, group=self._group, group_src=source, async_op=True),
        )

    def meet(self, message: bytes) -> Sequence[bytes]:
        own = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.world)]
        self._run("meet", lambda: dist.all_gather(found, own, group=self._group, async_op=True))
        return [bytes(each.numpy())[: len(message)] for each in found]

    def abort(self, error: BaseException) -> None:
        # Nothing interrupts a call of gloo. The threads of all ranks stop waiting for it instead.
        self.watch.fail(error)

    def close(self) -> None:
        """Destroy the process group and wait for its threads to end. No rank may be in a call.

        Nothing else in Python may refer to the group, or its threads continue.
        """
        group = self._group
        del self._group
        # A thread of gloo holds the tensors of a call for a moment after the call has ended. If it
        # is the last to hold them, it needs the interpreter's lock to release them. Once Python has
        # begun to shut down, CPython ends a thread that asks for the lock, here in the middle of a
        # destructor, and that aborts the process. So the threads have to end before, and they only
        # do when the backend is destroyed: destroy_process_group removes no more than torch's own
        # references to it.
        backend = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group(group)
        # The backend goes last, because its own destructor releases the lock while it waits for the
        # threads. In torch 2.6, the destructor of a group does not, and could wait forever.
        del group
        del backend

    def _run(self, what: str, start: Callable[[], dist.Work]) -> None:
        """Start a call of torch.distributed and wait for it, as long as all ranks are there."""
        with self.watch.call(what):
            try:
                work = start()
            except RuntimeError as error:
                self.watch.explain(error)
            self.watch.wait(work)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
