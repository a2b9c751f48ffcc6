"""The store: named extents on one or more disks, read and written asynchronously."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock import _native
from penstock.memory.arena import Arena
from penstock.storage.engines import EngineChoice, EngineName, choose_engine
from penstock.storage.errors import StorageWarning, StoreClosedError, StoreFullError
from penstock.storage.header import DATA_OFFSET
from penstock.storage.layout import Extent, check_transfer
from penstock.storage.store_files import (
    StoreFiles,
    StoreOptions,
    create_store_files,
    remove_store_files,
)
from penstock.storage.tickets import StoreTicket, TransferLedger, describe_request, wait_for_tickets
from penstock.storage.volume import Volume
from penstock.units import format_bytes, parse_bytes, round_up

__all__ = ["Store", "StoreOptions", "StoreStats"]

FINALIZER_TIMEOUT = 5.0
"""Seconds that a store which was never closed waits for its devices when it is finalized."""

_leaked: list[object] = []
"""Buffers and descriptors of requests that a device never answered. They are kept for the life of
the process, because the device may still write to the buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A store's capacity and the bytes moved since it was created."""

    capacity: int
    used: int
    """Bytes allocated to extents, padding included."""
    read_nbytes: int
    written_nbytes: int
    requests: int
    """Number of requests that the kernel has completed."""
    retries: int
    """Requests that were continued after a short transfer or retried: 0 on a healthy disk."""


class Store:
    """Preallocated space on one or more disks, allocated to named extents.

    Transfers are asynchronous: `start_read` and `start_write` return a `StoreTicket`. Any number of
    them may be in flight. A store is safe to use from several threads. Closing it removes it from
    its disks.
    """

    def __init__(
        self, files: StoreFiles, choice: EngineChoice, *, verify: bool, options: StoreOptions
    ) -> None:
        self.engine = choice
        self.verify = verify
        self._files = files
        self._native = _make_engine(files, choice, options)
        # Guards all fields below. Transfers themselves run in the native engine without it.
        self._lock = threading.Lock()
        self._extents: dict[str, Extent] = {}
        self._used = 0
        self._checksums: dict[str, _native.Checksums | None] = {}
        self._written: set[str] = set()  # names of extents that a write was started for
        self._ledger = TransferLedger()
        self._registered: list[object] = []
        # Runs when the store is garbage-collected or the interpreter exits without close(). It
        # must not refer to `self`, which would keep the store alive.
        self._finalizer = weakref.finalize(
            self, _finalize, os.getpid(), self._native, files, self._ledger
        )

    @classmethod
    def create(
        cls,
        paths: str | Path | Sequence[str | Path],
        capacity: int | str | None = None,
        *,
        engine: EngineName = "auto",
        verify: bool = True,
        erase: bool = False,
        options: StoreOptions | None = None,
    ) -> Self:
        """Create a store and allocate all of its disk space.

        Args:
            paths: directories or raw devices. Stripes are distributed over several of them.
            capacity: size in bytes or as text such as `"200GiB"`. It may be omitted if all paths
                are raw devices, which are then used whole.
            engine: `"io_uring"`, `"threads"`, or `"auto"` for io_uring where it is available.
            verify: keep a checksum of every unit written in memory and check it on every read. A
                unit that was never written cannot be read then.
            erase: allow raw devices that hold data. A device in use is always refused.
            options: settings that rarely need to change.
        """
        options = options or StoreOptions()
        choice = choose_engine(engine)
        nbytes = None if capacity is None else parse_bytes(capacity)
        listed = [paths] if isinstance(paths, str | Path) else list(paths)
        files = create_store_files(listed, nbytes, options, engine=choice, erase=erase)
        try:
            return cls(files, choice, verify=verify, options=options)
        except BaseException:
            for volume in files.volumes:
                volume.remove()
            raise

    def allocate(self, nbytes: int, *, name: str) -> Extent:
        """Allocate the next free bytes to an extent with a unique name."""
        layout, capacity = self._files.layout, self._files.capacity
        if nbytes < 1:
            raise ValueError(f"{name}: an extent must have at least 1 byte, got {nbytes}")
        stored = round_up(nbytes, layout.alignment)
        with self._lock_open():
            if name in self._extents:
                raise ValueError(f"there is already an extent named {name!r}")
            start = layout.next_start(self._used)
            free = max(0, capacity - start)
            if stored > round_up(free, layout.alignment):
                raise StoreFullError(name=name, wanted=stored, free=free, capacity=capacity)
            extent = Extent(name, nbytes, stored, start)
            self._checksums[name] = _native.Checksums(stored, layout.unit) if self.verify else None
            self._extents[name] = extent
            self._used = start + stored
            return extent

    def start_read(
        self, extent: Extent, buffer: object, *, offset: int = 0, nbytes: int | None = None
    ) -> StoreTicket:
        """Start to fill `buffer` from the extent. Do not touch it until the ticket is done."""
        return self._start("read", extent, buffer, offset, nbytes)

    def start_write(
        self, extent: Extent, buffer: object, *, offset: int = 0, nbytes: int | None = None
    ) -> StoreTicket:
        """Start to write `buffer` to the extent. Do not modify it until the ticket is done."""
        return self._start("write", extent, buffer, offset, nbytes)

    def note_lost(self, extent: Extent, why: str) -> None:
        """Let reads of an extent raise LostExtentError until it is written.

        For a write that could not be started: the store does not know of it, and still has the
        bytes before it.
        """
        with self._lock_open():
            self._ledger.note_lost(extent, why)

    def assume_zeros(self, extent: Extent) -> bool:
        """Let an extent that was never written be read as zeros, if its disks have zeros there.

        Return False if they may have something else, or if the extent was written: write zeros
        then. New files have zeros, and reading them does not even reach the disk. Raw devices have
        what their last user left.
        """
        with self._lock_open():
            if self._extents.get(extent.name) is not extent:
                raise ValueError(f"{extent.name} is not an extent of this store")
            if extent.name in self._written or not all(v.is_new for v in self._files.volumes):
                return False
            checksums = self._checksums[extent.name]
            if checksums is not None:
                checksums.note_zeros()
            return True

    def wait_any(
        self, tickets: Iterable[StoreTicket], timeout: float | None = None
    ) -> list[StoreTicket]:
        """Wait until at least one ticket is done, and return all tickets that are done.

        The list is empty if the timeout expires first. Failures are not raised.
        """
        tickets = list(tickets)
        wait_for_tickets(self._native, tickets, wait_for_all=False, timeout=timeout)
        return [ticket for ticket in tickets if ticket.done()]

    def wait_all(self, tickets: Iterable[StoreTicket], timeout: float | None = None) -> None:
        """Wait for all tickets, then raise the first failure."""
        tickets = list(tickets)
        wait_for_tickets(self._native, tickets, wait_for_all=True, timeout=timeout)
        for ticket in tickets:
            ticket.wait(0)

    def register(self, memory: Arena | _native.Block) -> bool:
        """Register memory with the kernel for faster I/O, and keep it mapped until `close()`.

        Return False if that is not possible (the threads engine, old kernels, a low memlock limit).
        Transfers then work as well, a little slower.
        """
        nbytes = memory.stats.capacity if isinstance(memory, Arena) else memory.nbytes
        with self._lock_open():
            if self._native.register_memory(memory.address, nbytes) != 0:
                return False
            self._registered.append(memory)
            return True

    @property
    def stats(self) -> StoreStats:
        """Capacity, and bytes moved since the store was created."""
        read, written, requests, retries = self._native.counters
        return StoreStats(
            capacity=self._files.capacity,
            used=self._used,
            read_nbytes=read,
            written_nbytes=written,
            requests=requests,
            retries=retries,
        )

    @property
    def alignment(self) -> int:
        """Addresses and lengths of buffers are multiples of this."""
        return self._files.layout.alignment

    @property
    def unit(self) -> int:
        """Offsets are multiples of this, and lengths too unless they reach the extent's end."""
        return self._files.layout.unit

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The open paths of the store."""
        return tuple(self._files.volumes)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self, *, timeout: float = 10.0) -> list[str]:
        """Cancel transfers that have not started, and remove the store from its disks.

        This always returns. The list describes the requests that a device has not answered after
        `timeout` seconds; a warning names them too. Their buffers and the files then stay.
        """
        with self._lock:
            if self._finalizer.detach() is None:
                return []
        unanswered = _close_engine(
            self._native, timeout, self._files, self._ledger, self._registered
        )
        if unanswered:
            return unanswered
        self._ledger.in_flight.clear()
        self._registered.clear()
        return remove_store_files(self._files, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        s = self.stats
        paths = ", ".join(v.path for v in self._files.volumes)
        used = f"{format_bytes(s.used)} of {format_bytes(s.capacity)} used"
        return f"Store({used}, {self.engine.name}, on {paths}{', closed' if self.closed else ''})"

    def _start(
        self, verb: str, extent: Extent, buffer: object, offset: int, nbytes: int | None
    ) -> StoreTicket:
        layout = self._files.layout
        address, buffer_nbytes = _native.buffer_span(buffer, verb == "read")
        length = buffer_nbytes if nbytes is None else nbytes
        check_transfer(
            layout,
            extent,
            address=address,
            buffer_nbytes=buffer_nbytes,
            offset=offset,
            length=length,
        )
        pieces = [
            (p.path, DATA_OFFSET + p.offset, p.into, p.nbytes, p.place)
            for p in layout.pieces(extent, offset, length)
        ]
        with self._lock_open():
            if self._extents.get(extent.name) is not extent:
                raise ValueError(f"{extent.name} is not an extent of this store")
            self._ledger.remove_finished()
            self._ledger.check(verb, extent, offset, length)
            if verb == "write":
                self._written.add(extent.name)
            transfer = self._native.start(
                verb == "write", address, pieces, self._checksums[extent.name]
            )
            ticket = StoreTicket(
                extent,
                (verb, offset, length),
                transfer=transfer,
                engine=self._native,
                buffer=memoryview(buffer),  # type: ignore[arg-type]
                volumes=self._files.volumes,
            )
            self._ledger.add(ticket)
            return ticket

    @contextmanager
    def _lock_open(self) -> Iterator[None]:
        """Hold the lock, and raise StoreClosedError if the store is closed."""
        with self._lock:
            if self.closed:
                raise StoreClosedError
            yield


def _make_engine(
    files: StoreFiles, choice: EngineChoice, options: StoreOptions
) -> _native.StoreEngine:
    layout = files.layout
    return _native.StoreEngine(
        choice.name,
        [volume.fd for volume in files.volumes],
        layout.alignment,
        # Whole units, because a unit's checksum is computed over one request.
        round_up(options.request_nbytes, layout.unit),
        options.depth * len(files.volumes),
        options.workers,
    )


def _close_engine(
    engine: _native.StoreEngine, timeout: float, files: StoreFiles, *in_use: object
) -> list[str]:
    """Stop the engine. Return, and warn about, requests that are still with the kernel.

    In that case keep the descriptors and the objects `in_use` for the life of the process.
    """
    paths = [volume.data_path for volume in files.volumes]
    unanswered = [describe_request(request, paths) for request in engine.close(timeout)]
    if unanswered:
        _leaked.extend([files, *in_use])
        warnings.warn(
            f"the store is closed, but {len(unanswered)} requests are still with the kernel; the "
            f"first one is a {unanswered[0]}. Their buffers stay allocated and the store stays on "
            f"disk. Check `dmesg` for errors of the device",
            StorageWarning,
            stacklevel=3,
        )
    return unanswered


def _finalize(
    pid: int, engine: _native.StoreEngine, files: StoreFiles, ledger: TransferLedger
) -> None:
    """Close and remove a store that was dropped without `close()`.

    A forked child inherits the finalizer, but only the process that created the store may remove
    it.
    """
    if os.getpid() == pid and not _close_engine(engine, FINALIZER_TIMEOUT, files, ledger):
        remove_store_files(files, FINALIZER_TIMEOUT)
