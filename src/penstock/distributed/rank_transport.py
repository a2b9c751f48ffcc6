"""The transport of a run's processes: gloo until there is a plan, and then what the plan names.

Ranks must reach each other before there is a plan, because rank 0 makes it for all. The plan then
says how weights and gradients pass: through shared host memory, or by collective calls, which are
NCCL's on GPUs and gloo's on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.distributed.gloo_ranks import GlooTransport
from penstock.distributed.nccl_ranks import NcclTransport
from penstock.distributed.peer_sockets import connect_ranks
from penstock.distributed.shared_ranks import MAILBOX_NBYTES, SharedTransport
from penstock.engine.device import Device
from penstock.engine.transport import SharedMemory
from penstock.memory.placement import Place
from penstock.plan.placement import TransportName


class RankTransport:
    """The transport of this process (a `penstock.engine.transport.Transport`)."""

    def __init__(self, control: GlooTransport, store: Store) -> None:
        self.rank, self.world = control.rank, control.world
        self._control, self._store = control, store
        self._data: GlooTransport | NcclTransport | SharedTransport = control
        self._opened = 0

    @property
    def memory(self) -> SharedMemory | None:
        return self._data.memory

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        self._close_data()
        self._opened += 1
        if wanted == "shared":
            store = PrefixStore(f"shared {self._opened}", self._store)
            self._data = SharedTransport(
                connect_ranks(store, self.rank, self.world), self._control.watch, device,
                mailbox_nbytes=mailbox_nbytes or MAILBOX_NBYTES, place=place,
            )  # fmt: skip
        elif device.torch_device.type == "cuda":
            self._data = NcclTransport(self._control, device)

    def gather(self, shards: torch.Tensor) -> None:
        self._data.gather(shards)

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        self._data.exchange(parts, into, senders)

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        self._data.broadcast(values, source)

    def meet(self, message: bytes) -> Sequence[bytes]:
        return self._data.meet(message)

    def abort(self, error: BaseException) -> None:
        self._data.abort(error)

    def close(self) -> None:
        """Release what `open` has opened, and leave the group. No rank may be in a call."""
        self._close_data()
        self._control.close()

    def _close_data(self) -> None:
        if not isinstance(self._data, GlooTransport):
            self._data.close()
        self._data = self._control
