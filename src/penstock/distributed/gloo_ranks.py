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
        self._group = dist.group.WORLD if group is None else group
        assert self._group is not None, "call torch.distributed.init_process_group first"
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
