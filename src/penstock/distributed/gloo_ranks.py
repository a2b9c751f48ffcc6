"""Ranks in processes, on torch.distributed with gloo, for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from penstock.errors import PeerLostError


class GlooTransport:
    """The transport of this process (a `penstock.engine.transport.Transport`).

    Everything is sent as bytes: gloo does not know every type, and never does arithmetic here.
    Ranks are numbered within `group`, a process group of torch.distributed with the backend gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = dist.group.WORLD if group is None else group
        assert self._group is not None, "call torch.distributed.init_process_group first"
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._failed: BaseException | None = None

    def gather(self, shards: torch.Tensor) -> None:
        parts = list(_as_bytes(shards).view(self.world, -1))
        self._call(lambda: dist.all_gather(parts, parts[self.rank], group=self._group))

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        part = _as_bytes(parts).numel() // self.world
        received = [part * (rank < senders) for rank in range(self.world)]
        sent = [part * (self.rank < senders)] * self.world
        source, target = _as_bytes(parts)[: sum(sent)], _as_bytes(into)[: sum(received)]
        self._call(
            lambda: dist.all_to_all_single(target, source, received, sent, group=self._group)
        )

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        self._call(lambda: dist.broadcast(_as_bytes(values), group=self._group, group_src=source))

    def meet(self, message: bytes) -> Sequence[bytes]:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.world)]
        self._call(lambda: dist.all_gather(found, own, group=self._group))
        return [bytes(each.numpy()) for each in found]

    def abort(self, error: BaseException) -> None:
        # gloo cannot interrupt the calls of other processes: they fail when this one ends.
        self._failed = error

    def _call(self, collective: Callable[[], object]) -> None:
        if self._failed is not None:
            raise PeerLostError(self.rank, f"{type(self._failed).__name__}: {self._failed}")
        try:
            collective()
        except RuntimeError as error:
            self._failed = error
            raise PeerLostError(None, str(error)) from error


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
