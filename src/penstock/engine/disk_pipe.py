"""Between the device and disks, through small host buffers. Room: move."""

from __future__ import annotations

import torch

from penstock.engine.device import Device, Moment
from penstock.memory.arena import Arena
from penstock.roles import EXTENT
from penstock.storage.layout import Extent
from penstock.storage.store import Store
from penstock.storage.tickets import StoreTicket
from penstock.units import round_up


class Tickets:
    """Transfers under way, as one mark."""

    def __init__(self, tickets: list[StoreTicket]) -> None:
        self._tickets = tickets
        self.ended: Moment | None = None
        """When somebody first saw that they were done: no later than their user began."""

    def settle(self) -> None:
        for ticket in self._tickets:
            ticket.settle()  # all of them, before the first failure is told
        for ticket in self._tickets:
            ticket.wait()
        if self.ended is None:
            self.ended = Moment()


class DiskPipe:
    """Two buffers of one lane: while one is on its way to or from the disk, the other is on its way
    from or to the device."""

    def __init__(self, store: Store, device: Device, arena: Arena, nbytes: int) -> None:
        self._store, self._device = store, device
        assert nbytes % (2 * store.unit) == 0, nbytes
        whole = arena.tensor(nbytes, torch.uint8, align=EXTENT, name="a ring's buffer")
        self._halves = (whole[: nbytes // 2], whole[nbytes // 2 :])
        self._tickets: list[StoreTicket | None] = [None, None]
        self._turn = 0

    def write(self, extent: Extent, source: torch.Tensor) -> None:
        """All of `source`, bytes on the device. On return it may change; `finish` waits for the
        disk."""
        step = self._halves[0].numel()
        for at in range(0, source.numel(), step):
            half, index = self._next()
            count = min(step, source.numel() - at)
            self._device.copy(half[:count], source[at : at + count])
            self._device.mark().settle()
            moved = half[: round_up(count, EXTENT)].numpy()
            self._tickets[index] = self._store.start_write(extent, moved, offset=at)

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """All of `into`, bytes on the device, issued on the current lane."""
        step = self._halves[0].numel()
        starts = list(range(0, into.numel(), step))
        reads: dict[int, tuple[torch.Tensor, StoreTicket]] = {}
        for number in range(len(starts) + 1):
            if number < len(starts):
                half, index = self._next()
                count = min(step, into.numel() - starts[number])
                view = half[: round_up(count, EXTENT)].numpy()
                ticket = self._store.start_read(extent, view, offset=starts[number])
                self._tickets[index] = ticket
                reads[number] = (half[:count], ticket)
            if number > 0:
                half, ticket = reads.pop(number - 1)
                ticket.wait()
                at = starts[number - 1]
                self._device.copy(into[at : at + half.numel()], half)
                self._device.mark().settle()  # the buffer is read into again

    def finish(self) -> None:
        """The disk has all of it."""
        for index, ticket in enumerate(self._tickets):
            if ticket is not None:
                ticket.wait()
            self._tickets[index] = None

    def abandon(self) -> None:
        """After a failure: whatever was under way is no business of the next run."""
        for index, ticket in enumerate(self._tickets):
            if ticket is not None:
                ticket.settle()
            self._tickets[index] = None

    def _next(self) -> tuple[torch.Tensor, int]:
        self._turn ^= 1
        ticket = self._tickets[self._turn]
        if ticket is not None:
            ticket.wait()
        return self._halves[self._turn], self._turn
