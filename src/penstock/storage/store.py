"""Extents on disk, read and written by ticket. Room: hold."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock import _native
from penstock.memory.arena import Arena
from penstock.storage.accounts import Accounts, StoreStats
from penstock.storage.building import Parts, StoreOptions, build, make_engine, reopen
from penstock.storage.ending import abandon, end_engine, keep_volumes, remove_volumes
from penstock.storage.endurance import Wear, wear_of
from penstock.storage.engines import EngineChoice, EngineName, choose_engine
from penstock.storage.errors import StoreClosedError, StoreFullError
from penstock.storage.header import DATA_OFFSET
from penstock.storage.layout import Extent
from penstock.storage.ledger import Ledger
from penstock.storage.spans import check_span
from penstock.storage.table import table_to_bytes
from penstock.storage.tickets import Ticket, settle
from penstock.storage.volume import Volume
from penstock.units import format_bytes, parse_bytes, round_up


class Store:
    """Preallocated room on one or more disks, handed out in named extents.

    Many transfers may be under way; each has a ticket. Safe to use from several threads.
    """

    def __init__(
        self, parts: Parts, choice: EngineChoice, *, verify: bool, options: StoreOptions
    ) -> None:
        self.engine = choice
        self.verify = verify
        self.uuid = parts.uuid
        self._parts = parts
        self._native = make_engine(parts, choice, options)
        self._lock = threading.Lock()  # guards all below
        self._extents = {extent.name: extent for extent in parts.extents}
        self._used = max((e.start + e.stored_nbytes for e in parts.extents), default=0)
        self._checksums = {e.name: self._new_checksums(e) for e in parts.extents}
        self._ledger = Ledger()
        self._registered: list[object] = []
        self._accounts = Accounts(self._native)
        self._end = weakref.finalize(self, abandon, os.getpid(), self._native, parts, self._ledger)

    # Making one

    @classmethod
    def create(
        cls,
        paths: str | Path | Sequence[str | Path],
        capacity: int | str | None = None,
        *,
        engine: EngineName = "auto",
        verify: bool = False,
        erase: bool = False,
        options: StoreOptions | None = None,
    ) -> Self:
        """Take `capacity` on the disks of `paths`, directories or raw devices, now.

        With `verify`, a checksum is kept for every unit written and checked when it is read. A raw
        device that holds something is refused unless `erase`; one in use is always refused.
        """
        options = options or StoreOptions()
        choice = choose_engine(engine)
        wanted = None if capacity is None else parse_bytes(capacity)
        parts = build(_listed(paths), wanted, options, engine=choice, erase=erase)
        return cls._around(parts, choice, verify=verify, options=options)

    @classmethod
    def open(
        cls,
        data_paths: str | Path | Sequence[str | Path],
        *,
        engine: EngineName = "auto",
        verify: bool = False,
        options: StoreOptions | None = None,
    ) -> Self:
        """A store that was closed with keep=True, or left by a killed run: its `data` files.

        Checksums are not kept on disk: they guard what is written from now on.
        """
        choice = choose_engine(engine)
        parts = reopen(_listed(data_paths))
        return cls._around(parts, choice, verify=verify, options=options or StoreOptions())

    @classmethod
    def _around(
        cls, parts: Parts, choice: EngineChoice, *, verify: bool, options: StoreOptions
    ) -> Self:
        try:
            return cls(parts, choice, verify=verify, options=options)
        except BaseException:
            for volume in parts.volumes:
                volume.close()
            raise

    # Extents

    def allocate(self, nbytes: int, *, name: str) -> Extent:
        """The next free bytes, under a name of their own."""
        layout = self._parts.layout
        if nbytes < 1:
            raise ValueError(f"{name}: an extent holds at least 1 byte, got {nbytes}")
        stored = round_up(nbytes, layout.alignment)
        with self._open():
            if name in self._extents:
                raise ValueError(f"there is an extent {name!r} already")
            start = layout.next_start(self._used)
            free = max(0, self._parts.capacity - start)
            if stored > round_up(free, layout.alignment):
                raise StoreFullError(
                    name=name, wanted=stored, free=free, capacity=self._parts.capacity
                )
            extent = Extent(name, nbytes, stored, start)
            self._checksums[name] = self._new_checksums(extent)
            self._extents[name] = extent
            self._used = start + stored
            return extent

    def __getitem__(self, name: str) -> Extent:
        return self._extents[name]

    def __iter__(self) -> Iterator[Extent]:
        return iter(list(self._extents.values()))

    # Moving bytes

    def start_read(
        self, extent: Extent, buffer: object, *, offset: int = 0, nbytes: int | None = None
    ) -> Ticket:
        """Fill `buffer` from the extent. The buffer is the ticket's until it is done."""
        return self._start("read", extent, buffer, offset, nbytes)

    def start_write(
        self, extent: Extent, buffer: object, *, offset: int = 0, nbytes: int | None = None
    ) -> Ticket:
        """Put `buffer` into the extent. The buffer must not change until the ticket is done."""
        return self._start("write", extent, buffer, offset, nbytes)

    def _start(
        self, verb: str, extent: Extent, buffer: object, offset: int, nbytes: int | None
    ) -> Ticket:
        layout = self._parts.layout
        address, held = _native.buffer_span(buffer, verb == "read")
        length = held if nbytes is None else nbytes
        check_span(layout, extent, address=address, held=held, offset=offset, length=length)
        pieces = [
            (p.path, DATA_OFFSET + p.offset, p.into, p.nbytes, p.place)
            for p in layout.pieces(extent, offset, length)
        ]
        with self._open():
            if self._extents.get(extent.name) is not extent:
                raise ValueError(f"{extent.name} is not an extent of this store")
            self._ledger.note_finished()
            self._ledger.check(verb, extent, offset, length)
            transfer = self._native.start(
                verb == "write", address, pieces, self._checksums[extent.name]
            )
            ticket = Ticket(
                extent,
                (verb, offset, length),
                transfer=transfer,
                engine=self._native,
                buffer=memoryview(buffer),  # type: ignore[arg-type]
                volumes=self._parts.volumes,
            )
            self._ledger.add(ticket)
            return ticket

    def wait_any(self, tickets: Iterable[Ticket], timeout: float | None = None) -> list[Ticket]:
        """Those that are done, at least one unless the time runs out. Failures are not raised."""
        tickets = list(tickets)
        settle(self._native, tickets, wait_for_all=False, timeout=timeout)
        return [ticket for ticket in tickets if ticket.done]

    def wait_all(self, tickets: Iterable[Ticket], timeout: float | None = None) -> None:
        """Wait for every one of them, then raise the first failure."""
        tickets = list(tickets)
        settle(self._native, tickets, wait_for_all=True, timeout=timeout)
        for ticket in tickets:
            ticket.wait(0)

    def register(self, memory: Arena | _native.Block) -> bool:
        """Let the kernel keep this memory ready for I/O, and keep it mapped until close().

        False where it will not (the threads engine, old kernels, a low memlock limit): transfers
        work all the same, a little slower.
        """
        nbytes = memory.stats.capacity if isinstance(memory, Arena) else memory.nbytes
        with self._open():
            if self._native.register_memory(memory.address, nbytes) != 0:
                return False
            self._registered.append(memory)
            return True

    # Accounts

    def end_step(self) -> StoreStats:
        """Close the account of a training step: what was moved since the last one."""
        with self._lock:
            self._accounts.end_step()
        return self.stats

    @property
    def stats(self) -> StoreStats:
        """Bytes moved in this run and in its last whole step."""
        return self._accounts.read(capacity=self._parts.capacity, used=self._used)

    def wear(self) -> dict[str, Wear | None]:
        """What each drive says of its own life; None where it cannot be asked."""
        return {v.path: wear_of(v.data_path) for v in self._parts.volumes}

    @property
    def alignment(self) -> int:
        """What addresses of buffers, and lengths, are multiples of."""
        return self._parts.layout.alignment

    @property
    def unit(self) -> int:
        """What offsets are multiples of, and lengths too unless they reach the extent's end."""
        return self._parts.layout.unit

    @property
    def volumes(self) -> tuple[Volume, ...]:
        return tuple(self._parts.volumes)

    # Ending

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def close(self, *, keep: bool = False, timeout: float = 10.0) -> list[str]:
        """End, and remove the store from its disks unless `keep`. Always returns.

        Transfers that have not begun fail. What a device has not answered after `timeout` seconds
        is returned, and warned about; its buffers, and then also the files, stay as they are.
        """
        with self._lock:
            if self._end.detach() is None:
                return []
        if keep:
            settle(self._native, self._ledger.moving, wait_for_all=True, timeout=timeout)
        held = (self._ledger, self._registered)
        if hanging := end_engine(self._native, timeout, self._parts, *held):
            return hanging
        self._ledger.moving.clear()
        self._registered.clear()
        if keep:
            return keep_volumes(self._parts, table_to_bytes(self._extents.values()), timeout)
        return remove_volumes(self._parts, timeout)

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
        where = ", ".join(v.path for v in self._parts.volumes)
        used = f"{format_bytes(s.used)} of {format_bytes(s.capacity)} used"
        return f"Store({used}, {self.engine.name}, on {where}{', closed' if self.closed else ''})"

    # Bookkeeping: the lock is held

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self.closed:
                raise StoreClosedError
            yield

    def _new_checksums(self, extent: Extent) -> _native.Checksums | None:
        unit = self._parts.layout.unit
        return _native.Checksums(extent.stored_nbytes, unit) if self.verify else None


def _listed(paths: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)
