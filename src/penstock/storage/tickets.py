"""Tickets of transfers in flight, and the ledger of the bytes they cover."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence

from penstock import _native
from penstock.storage.engines import wait_for_transfers
from penstock.storage.errors import (
    ChecksumError,
    ExtentBusyError,
    LostExtentError,
    StorageError,
    StoreClosedError,
    TransferError,
    TruncatedStoreError,
    UnwrittenExtentError,
)
from penstock.storage.layout import Extent
from penstock.storage.volume import Volume


class StoreTicket:
    """One read or write of a store (a `penstock.ticket.Ticket[None]`).

    The ticket keeps the buffer alive until the transfer is done.

    "Done" means that no I/O touches the buffer any more, whether or not the transfer succeeded.
    """

    __slots__ = (
        "_buffer",
        "_engine",
        "_transfer",
        "_volumes",
        "extent",
        "length",
        "offset",
        "verb",
    )

    def __init__(
        self,
        extent: Extent,
        span: tuple[str, int, int],
        *,
        transfer: _native.Transfer,
        engine: _native.StoreEngine,
        buffer: memoryview,
        volumes: Sequence[Volume],
    ) -> None:
        self.extent = extent
        self.verb, self.offset, self.length = span
        self._transfer, self._engine = transfer, engine
        self._buffer: memoryview | None = buffer
        self._volumes = volumes

    def done(self) -> bool:
        """Return whether the transfer has ended and the caller may use the buffer again."""
        if not self._transfer.done:
            return False
        self._buffer = None
        return True

    @property
    def finished_at(self) -> float | None:
        """When the disk had finished, by `time.perf_counter`; None while it has not."""
        return self._transfer.ended if self._transfer.done else None

    def settle(self, timeout: float | None = None) -> None:
        """Wait until done, or until the timeout expires, without raising on failure."""
        wait_for_tickets(self._engine, [self], wait_for_all=True, timeout=timeout)
        self.done()  # releases the buffer

    def wait(self, timeout: float | None = None) -> None:
        """Wait until done. Raise StorageError on failure, TimeoutError if the timeout expires."""
        self.settle(timeout)
        if not self.done():
            raise TimeoutError(f"{self.verb} of {self.extent.name} did not finish in {timeout} s")
        if error := self.failure():
            raise error

    def failure(self) -> StorageError | None:
        """Return why the transfer failed, or None if it succeeded or is still in flight."""
        if not self._transfer.done or (failure := self._transfer.failure) is None:
            return None
        code, file, offset, place, length = failure
        volume, extent = self._volumes[file], self.extent.name
        path = volume.data_path
        if volume.is_device and code in (_native.END_OF_FILE, errno.ENOSPC):
            # A drive that was removed has size 0: reads hit its end, and writes find it full.
            code = errno.ENODEV
        if code == _native.END_OF_FILE:
            return TruncatedStoreError(extent=extent, path=path, offset=offset, length=length)
        if code == _native.BAD_CHECKSUM:
            return ChecksumError(extent=extent, path=path, offset=offset, extent_offset=place)
        if code == _native.NEVER_WRITTEN:
            return UnwrittenExtentError(extent=extent, offset=place)
        if code == errno.ECANCELED:
            return StoreClosedError(
                f"{self.verb} of {extent}: the store was closed before the transfer started"
            )
        return TransferError(
            verb=self.verb, extent=extent, path=path, offset=offset, length=length, errno=code
        )

    def overlaps(self, extent: Extent, offset: int, length: int) -> bool:
        """Return whether the transfer covers any of these bytes."""
        same = self.extent.start == extent.start
        return same and self.offset < offset + length and offset < self.offset + self.length

    def __repr__(self) -> str:
        state = "done" if self.done() else "in flight"
        return f"<{self.verb} of {self.extent.name}, {self.length} B at {self.offset}: {state}>"


def wait_for_tickets(
    engine: _native.StoreEngine,
    tickets: Sequence[StoreTicket],
    *,
    wait_for_all: bool,
    timeout: float | None,
) -> bool:
    """Wait for one or all tickets. Return False if the timeout expires first."""
    transfers = [ticket._transfer for ticket in tickets]
    if not transfers:
        return True
    return wait_for_transfers(engine, transfers, wait_for_all=wait_for_all, timeout=timeout)


def describe_request(request: tuple[bool, int, int, int], paths: Sequence[str]) -> str:
    """Describe a request that the kernel has not answered, for messages."""
    write, file, offset, nbytes = request
    return f"{'write' if write else 'read'} of {nbytes} B at {offset} of {os.fspath(paths[file])}"


class TransferLedger:
    """The transfers in flight, and the bytes that failed writes have lost.

    The ledger holds the tickets, and the tickets hold the buffers: memory stays valid while I/O
    uses it even if the caller drops the ticket. The store's lock guards every method.
    """

    def __init__(self) -> None:
        self.in_flight: list[StoreTicket] = []
        self._lost: dict[str, list[tuple[int, int, str]]] = {}
        """Per extent, the lost ranges `[start, end)` and the reason."""

    def add(self, ticket: StoreTicket) -> None:
        """Record a transfer that has been started."""
        self.in_flight.append(ticket)

    def remove_finished(self) -> None:
        """Drop the transfers that are done, and record the bytes that failed writes have lost."""
        finished = [ticket for ticket in self.in_flight if ticket.done()]
        if not finished:
            return
        self.in_flight[:] = [ticket for ticket in self.in_flight if ticket not in finished]
        for ticket in finished:
            if ticket.verb == "write" and (error := ticket.failure()):
                span = (ticket.offset, ticket.offset + ticket.length, str(error))
                self._lost.setdefault(ticket.extent.name, []).append(span)

    def note_lost(self, extent: Extent, why: str) -> None:
        """Let reads of an extent fail until it is written again."""
        self._lost.setdefault(extent.name, []).append((0, extent.nbytes, why))

    def check(self, verb: str, extent: Extent, offset: int, length: int) -> None:
        """Raise if a transfer would overtake another one, or read bytes that were lost.

        Call this for a transfer that is about to start: a write makes its bytes valid again.
        """
        for ticket in self.in_flight:
            both_read = verb == ticket.verb == "read"
            if not both_read and ticket.overlaps(extent, offset, length):
                raise ExtentBusyError(extent=extent.name, verb=verb, other=ticket.verb)
        lost = self._lost.get(extent.name, [])
        if verb == "write":
            if lost:
                self._lost[extent.name] = list(_subtract(lost, offset, offset + length))
            return
        for start, end, why in lost:
            if start < offset + length and offset < end:
                raise LostExtentError(extent=extent.name, offset=start, length=end - start, why=why)


def _subtract(
    spans: Iterable[tuple[int, int, str]], start: int, end: int
) -> Iterator[tuple[int, int, str]]:
    """Yield what remains of the spans without `[start, end)`."""
    for low, high, why in spans:
        if low < min(high, start):
            yield low, min(high, start), why
        if max(low, end) < high:
            yield max(low, end), high, why
