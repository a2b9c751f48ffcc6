"""Transfers under way. Room: hold."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence

from penstock import _native
from penstock.storage.errors import (
    ChecksumError,
    StorageError,
    StoreClosedError,
    TransferError,
    TruncatedStoreError,
)
from penstock.storage.layout import Extent
from penstock.storage.volume import Volume

SLICE = 0.1
"""Seconds in the kernel between two looks at Python's signals, so that Ctrl-C ends a wait."""


class Ticket:
    """One read or write, and the buffer it uses: hold on to either and both stay.

    Done means that no I/O touches the buffer any more, whether or not it succeeded.
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

    @property
    def done(self) -> bool:
        """True once the buffer is the caller's again."""
        if not self._transfer.done:
            return False
        self._buffer = None
        return True

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until done, and say nothing about failure. False if the time ran out first."""
        settle(self._engine, [self], wait_for_all=True, timeout=timeout)
        return self.done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until done; raise StorageError if it failed, TimeoutError if it takes too long."""
        if not self.settle(timeout):
            raise TimeoutError(f"{self.verb} of {self.extent.name} not done in {timeout} s")
        if failed := self.failure():
            raise failed

    def failure(self) -> StorageError | None:
        """Why it failed, or None: it has not, or is not done."""
        if not self._transfer.done or (failed := self._transfer.failure) is None:
            return None
        code, file, offset, place, length = failed
        volume, extent = self._volumes[file], self.extent.name
        path = volume.data_path
        if volume.is_device and code in (_native.END_OF_FILE, errno.ENOSPC):
            code = errno.ENODEV  # one that is gone has no bytes: it reads as ended, and as full
        if code == _native.END_OF_FILE:
            return TruncatedStoreError(extent=extent, path=path, offset=offset, length=length)
        if code == _native.BAD_CHECKSUM:
            return ChecksumError(extent=extent, path=path, offset=place, length=length)
        if code == errno.ECANCELED:
            return StoreClosedError(
                f"{self.verb} of {extent}: the store was closed before it began"
            )
        return TransferError(
            verb=self.verb, extent=extent, path=path, offset=offset, length=length, errno=code
        )

    def overlaps(self, extent: Extent, offset: int, length: int) -> bool:
        same = self.extent.start == extent.start
        return same and self.offset < offset + length and offset < self.offset + self.length

    def __repr__(self) -> str:
        state = "done" if self.done else "under way"
        return f"<{self.verb} of {self.extent.name}, {self.length} B at {self.offset}: {state}>"


def settle(
    engine: _native.StoreEngine,
    tickets: Sequence[Ticket],
    *,
    wait_for_all: bool,
    timeout: float | None,
) -> bool:
    """Wait for one of them or for all. False if the time ran out first."""
    transfers = [ticket._transfer for ticket in tickets]
    if not transfers:
        return True
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE if end is None else min(SLICE, max(0.0, end - time.monotonic()))
        if engine.wait(transfers, wait_for_all, left):
            return True
        if end is not None and time.monotonic() >= end:
            return False


def describe_hanging(request: tuple[bool, int, int, int], paths: Sequence[str]) -> str:
    """One request that the kernel never answered."""
    write, file, offset, nbytes = request
    return f"{'write' if write else 'read'} of {nbytes} B at {offset} of {os.fspath(paths[file])}"
