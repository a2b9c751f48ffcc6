"""Copies between device memory and NVMe, through two small pinned host buffers.

Gradients and activations that live on NVMe take this way; weights and optimizer states pass through
the planned staging memory instead (`transfer.py`).
"""

from __future__ import annotations

import torch

from penstock.engine.device import Device
from penstock.memory.arena import Arena
from penstock.roles import EXTENT
from penstock.storage.layout import Extent
from penstock.storage.store import Store
from penstock.storage.tickets import StoreTicket
from penstock.units import round_up


class DiskPipe:
    """Double buffering for one lane.

    While one half is on its way to or from the disk, the other is on its way from or to the device.
    Only the lane's own thread uses the pipe; `abandon` runs when the lane is idle.
    """

    def __init__(self, store: Store, device: Device, arena: Arena, nbytes: int) -> None:
        self._store, self._device = store, device
        assert nbytes % (2 * store.unit) == 0, nbytes
        whole = arena.tensor(nbytes, torch.uint8, align=EXTENT, name="disk pipe buffer")
        self._halves = (whole[: nbytes // 2], whole[nbytes // 2 :])
        # Per half, the disk transfer that last used it.
        self._transfers: list[StoreTicket | None] = [None, None]
        self._current = 0

    def write(self, extent: Extent, source: torch.Tensor) -> None:
        """Write all of `source`, bytes on the device, to the extent.

        On return `source` may be overwritten; call `finish` to wait for the disk.
        """
        chunk = self._halves[0].numel()
        for start in range(0, source.numel(), chunk):
            half, index = self._next_half()
            count = min(chunk, source.numel() - start)
            self._device.copy(half[:count], source[start : start + count])
            self._device.record().wait()  # the disk must not read the half before it is full
            buffer = half[: self._transfer_nbytes(extent, start, count)].numpy()
            self._transfers[index] = self._store.start_write(extent, buffer, offset=start)

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Fill all of `into`, bytes on the device, from the extent, on the current lane."""
        chunk = self._halves[0].numel()
        starts = list(range(0, into.numel(), chunk))
        reads: dict[int, tuple[torch.Tensor, StoreTicket]] = {}
        # Start read number n, then copy what read n - 1 brought: the two overlap.
        for number in range(len(starts) + 1):
            if number < len(starts):
                half, index = self._next_half()
                count = min(chunk, into.numel() - starts[number])
                buffer = half[: self._transfer_nbytes(extent, starts[number], count)].numpy()
                transfer = self._store.start_read(extent, buffer, offset=starts[number])
                self._transfers[index] = transfer
                reads[number] = (half[:count], transfer)
            if number > 0:
                half, transfer = reads.pop(number - 1)
                transfer.wait()
                start = starts[number - 1]
                self._device.copy(into[start : start + half.numel()], half)
                self._device.record().wait()  # the next read overwrites this half

    def finish(self) -> None:
        """Block until the disk has everything; raise the first failure."""
        for index, transfer in enumerate(self._transfers):
            if transfer is not None:
                transfer.wait()
            self._transfers[index] = None

    def abandon(self) -> None:
        """Empty the pipe after a failed step, so that the next step does not see the failure."""
        for index, transfer in enumerate(self._transfers):
            if transfer is not None:
                transfer.settle()
            self._transfers[index] = None

    def _transfer_nbytes(self, extent: Extent, start: int, count: int) -> int:
        """Return how many bytes the store transfers for `count` of them.

        A smaller micro-batch ends within its extent, where the store transfers whole units.
        """
        return min(round_up(count, self._store.unit), extent.stored_nbytes - start)

    def _next_half(self) -> tuple[torch.Tensor, int]:
        """Return the half that was used longer ago, once its transfer has finished."""
        self._current ^= 1
        transfer = self._transfers[self._current]
        if transfer is not None:
            transfer.wait()
        return self._halves[self._current], self._current
