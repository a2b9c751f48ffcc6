"""Bytes moved, per run and per step: what a drive's life is spent on. Room: hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

from penstock import _native
from penstock.memory.arena import Arena
from penstock.storage.bandwidth import measure_bandwidth
from penstock.storage.endurance import Wear, wear_of
from penstock.storage.engines import EngineChoice, EngineName, choose_engine
from penstock.storage.errors import (
    DiskFullError,
    ExtentBusyError,
    HeaderError,
    LostExtentError,
    PathError,
    StorageWarning,
    StoreClosedError,
    StoreFullError,
)
from penstock.storage.header import DATA_OFFSET, HEADER_NBYTES, Header, parse_header
from penstock.storage.layout import Extent, Layout, check_span, make_pattern
from penstock.storage.owners import this_process
from penstock.storage.table import TABLE_NBYTES, TABLE_OFFSET, parse_table, table_to_bytes
from penstock.storage.tickets import Ticket, describe_hanging, settle
from penstock.storage.volume import Volume, create_volume, open_volume
from penstock.units import KiB, MiB, format_bytes, parse_bytes, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A store's bytes since it was made."""

    capacity: int
    used: int
    read_nbytes: int
    written_nbytes: int
    requests: int
    again: int
    """Requests that were continued or retried: 0 on a healthy disk."""
    steps: int
    step_read_nbytes: int
    """Of the last step that ended."""
    step_written_nbytes: int


class Accounts:
    """What the engine counted, cut at the ends of steps."""

    def __init__(self, engine: _native.StoreEngine) -> None:
        self._engine = engine
        self._before = self._after = (0, 0)
        self._steps = 0

    def end_step(self) -> None:
        read, written, _, _ = self._engine.counters
        self._before, self._after = self._after, (read, written)
        self._steps += 1

    def read(self, *, capacity: int, used: int) -> StoreStats:
        read, written, requests, again = self._engine.counters
        return StoreStats(
            capacity=capacity,
            used=used,
            read_nbytes=read,
            written_nbytes=written,
            requests=requests,
            again=again,
            steps=self._steps,
            step_read_nbytes=self._after[0] - self._before[0],
            step_written_nbytes=self._after[1] - self._before[1],
        )


# --------
# Which bytes are moving, and which were lost. Room: hold. The store's lock guards it.


class Ledger:
    """Transfers under way, by which their buffers stay, and what failed writes have left behind."""

    def __init__(self) -> None:
        self.moving: list[Ticket] = []
        self._lost: dict[str, list[tuple[int, int, str]]] = {}

    def add(self, ticket: Ticket) -> None:
        self.moving.append(ticket)

    def note_finished(self) -> None:
        """Forget transfers that are done; remember the bytes that failed writes have lost."""
        finished = [ticket for ticket in self.moving if ticket.done]
        if not finished:
            return
        self.moving[:] = [ticket for ticket in self.moving if ticket not in finished]
        for ticket in finished:
            if ticket.verb == "write" and (failed := ticket.failure()):
                span = (ticket.offset, ticket.offset + ticket.length, str(failed))
                self._lost.setdefault(ticket.extent.name, []).append(span)

    def check(self, verb: str, extent: Extent, offset: int, length: int) -> None:
        """No transfer overtakes another over the same bytes, and none reads what was lost."""
        for ticket in self.moving:
            both_read = verb == ticket.verb == "read"
            if not both_read and ticket.overlaps(extent, offset, length):
                raise ExtentBusyError(extent=extent.name, verb=verb, other=ticket.verb)
        lost = self._lost.get(extent.name, [])
        if verb == "write":
            if lost:
                self._lost[extent.name] = list(_without(lost, offset, offset + length))
            return
        for first, last, why in lost:
            if first < offset + length and offset < last:
                raise LostExtentError(
                    extent=extent.name, offset=first, length=last - first, why=why
                )


def _without(
    spans: Iterable[tuple[int, int, str]], first: int, last: int
) -> Iterator[tuple[int, int, str]]:
    """The spans less `[first, last)`."""
    for low, high, why in spans:
        if low < min(high, first):
            yield low, min(high, first), why
        if max(low, last) < high:
            yield max(low, last), high, why


# --------
# Putting a store together on its paths, all of them or none. Room: hold.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What rarely needs saying."""

    weights: Sequence[float] | None = None
    """Bandwidth of each path, in any unit. Measured if not given and there are several."""
    unit: int = 64 * KiB
    """The smallest part of an extent that can be read or written alone; it has its own checksum."""
    stripe_nbytes: int = 2 * MiB
    request_nbytes: int = 1 * MiB
    """The most that one request to the kernel moves."""
    depth: int = 16
    """Requests with the kernel at once, per path."""
    workers: int = 2
    """Threads that serve io_uring: checksums of a fast disk are more than one can do. The threads
    engine has one per request."""


@dataclass(slots=True)
class Parts:
    """What a store is made of."""

    uuid: UUID
    volumes: list[Volume]
    layout: Layout
    capacity: int
    extents: list[Extent]


def build(
    paths: Sequence[str | Path],
    capacity: int | None,
    options: StoreOptions,
    *,
    engine: EngineChoice,
    erase: bool,
) -> Parts:
    """Files or devices with headers and all their space. A failure leaves nothing behind."""
    _check_paths(paths, capacity, options)
    uuid = uuid4()
    volumes: list[Volume] = []
    try:
        first = _provisional(uuid)
        for path in paths:
            volumes.append(create_volume(path, uuid, first, erase=erase))
        layout = _lay_out(volumes, options, engine)
        capacity = capacity or _largest(volumes, layout)
        for volume, nbytes in zip(volumes, layout.path_nbytes(capacity), strict=True):
            volume.reserve(nbytes)
        for index, volume in enumerate(volumes):
            header = _header(first, layout, capacity, index, volume.reserved)
            volume.write_block(0, header.to_bytes())
        volumes[0].write_block(TABLE_OFFSET, bytes(HEADER_NBYTES))  # a device's last store had one
    except BaseException:
        for volume in volumes:
            with contextlib.suppress(OSError):
                volume.remove()
        raise
    return Parts(uuid, volumes, layout, capacity, [])


def reopen(data_paths: Sequence[str | Path]) -> Parts:
    """A store that was kept, or whose owner died, now owned by this process."""
    found: list[tuple[Header, Volume]] = []
    try:
        for path in data_paths:
            volume = open_volume(path)
            try:
                header = parse_header(volume.read_block(0, HEADER_NBYTES))
                _check_length(volume, header)
            except BaseException:
                volume.close()
                raise
            found.append((header, volume))
        found.sort(key=lambda pair: pair[0].path)
        _check_whole([header for header, _ in found])
        first, volume = found[0]
        layout = layout_of(first)
        extents = parse_table(volume.read_block(TABLE_OFFSET, TABLE_NBYTES), layout, first.capacity)
        owner = this_process()
        for header, volume in found:
            now = dataclasses.replace(
                header, pid=owner.pid, started=owner.started, boot=owner.boot, host=owner.host
            )
            volume.write_block(0, now.to_bytes())
            volume.reserved = header.data_nbytes
    except BaseException:
        for _, volume in found:
            volume.close()
        raise
    return Parts(first.uuid, [v for _, v in found], layout, first.capacity, extents)


def make_engine(parts: Parts, choice: EngineChoice, options: StoreOptions) -> _native.StoreEngine:
    unit = parts.layout.unit
    return _native.StoreEngine(
        choice.name,
        [volume.fd for volume in parts.volumes],
        parts.layout.alignment,
        round_up(options.request_nbytes, unit),  # no request ends inside a unit
        options.depth * len(parts.volumes),
        options.workers,
    )


def layout_of(header: Header) -> Layout:
    return Layout(
        pattern=header.pattern,
        alignment=header.alignment,
        unit=header.unit,
        stripe_nbytes=header.stripe_nbytes,
    )


def _check_paths(paths: Sequence[str | Path], capacity: int | None, options: StoreOptions) -> None:
    if not paths:
        raise PathError("a store", "needs at least one path")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise PathError(", ".join(map(str, paths)), "the same path twice")
    if capacity is not None and capacity < 1:
        raise PathError(str(paths[0]), f"a capacity of {capacity} B holds nothing")
    if capacity is None and not all(Path(path).is_block_device() for path in paths):
        raise PathError(str(paths[0]), "a capacity must be given unless every path is a raw device")
    if options.weights is not None and len(options.weights) != len(paths):
        raise PathError(str(paths[0]), f"{len(options.weights)} weights for {len(paths)} paths")


def _lay_out(volumes: Sequence[Volume], options: StoreOptions, engine: EngineChoice) -> Layout:
    weights = options.weights
    if weights is None:
        alone = len(volumes) == 1
        weights = [1.0 if alone else measure_bandwidth(v, engine.name) for v in volumes]
    alignment = max(volume.alignment for volume in volumes)
    unit = max(options.unit, alignment)
    return Layout(
        pattern=make_pattern(weights),
        alignment=alignment,
        unit=unit,
        stripe_nbytes=max(options.stripe_nbytes, unit),
    )


def _largest(volumes: Sequence[Volume], layout: Layout) -> int:
    """What raw devices hold together, the fastest to fill deciding."""
    held = [os.lseek(volume.fd, 0, os.SEEK_END) - DATA_OFFSET for volume in volumes]
    if layout.num_paths == 1:
        capacity = held[0] // layout.alignment * layout.alignment
    else:
        shares = [layout.pattern.count(path) * layout.stripe_nbytes for path in range(len(held))]
        capacity = min(h // s for h, s in zip(held, shares, strict=True)) * layout.round_nbytes
    if capacity < 1:
        raise DiskFullError(
            path=volumes[0].path, wanted=layout.round_nbytes, free=max(0, min(held))
        )
    return capacity


def _provisional(uuid: UUID) -> Header:
    """Says whose the file is while it is being made."""
    owner = this_process()
    block = 64 * KiB
    return Header(
        uuid=uuid, boot=owner.boot, pid=owner.pid, started=owner.started, host=owner.host,
        created_ns=time.time_ns(), capacity=block, data_nbytes=block, unit=block, alignment=block,
        stripe_nbytes=block, path=0, pattern=(0,),
    )  # fmt: skip


def _header(first: Header, layout: Layout, capacity: int, path: int, nbytes: int) -> Header:
    return dataclasses.replace(
        first,
        capacity=capacity,
        data_nbytes=nbytes,
        unit=layout.unit,
        alignment=layout.alignment,
        stripe_nbytes=layout.stripe_nbytes,
        path=path,
        pattern=layout.pattern,
    )


def _check_length(volume: Volume, header: Header) -> None:
    wanted = DATA_OFFSET + header.data_nbytes
    held = os.lseek(volume.fd, 0, os.SEEK_END)
    if held < wanted:
        raise PathError(
            volume.data_path,
            f"holds {format_bytes(held)} ({held} B) of a store of {format_bytes(wanted)} "
            f"({wanted} B): it was truncated, and what it held is lost",
        )


def _check_whole(headers: Sequence[Header]) -> None:
    if len({header.uuid for header in headers}) != 1:
        raise HeaderError("corrupt", "these paths belong to different stores")
    if [header.path for header in headers] != list(range(headers[0].num_paths)):
        have = ", ".join(str(header.path) for header in headers)
        raise HeaderError(
            "corrupt", f"paths {have} of {headers[0].num_paths}: give all of them once"
        )


# --------
# How a store ends, whatever its devices do. Room: hold.

LAST_CHANCE = 5.0
"""Seconds that a store which nobody closed waits for its devices."""

_hung: list[object] = []
"""Buffers and descriptors of requests that a device never answered: it may still write there."""


def end_engine(
    engine: _native.StoreEngine, timeout: float, parts: Parts, *held: object
) -> list[str]:
    """What still hangs after `timeout` seconds; then `held` and the descriptors stay for good."""
    paths = [volume.data_path for volume in parts.volumes]
    hanging = [describe_hanging(request, paths) for request in engine.close(timeout)]
    if hanging:
        _hung.extend([parts, *held])
        warnings.warn(
            f"closed, but {len(hanging)} requests are still with the kernel, first: {hanging[0]}. "
            f"Their buffers stay reserved and the store stays on disk; see `dmesg` for the device",
            StorageWarning,
            stacklevel=3,
        )
    return hanging


def remove_volumes(parts: Parts, timeout: float) -> list[str]:
    """From every disk that still answers; one that does not keeps a store for `store rm`.

    What hangs is returned, and warned about.
    """
    hanging = []
    for volume in parts.volumes:
        try:
            if _done_in(timeout, volume.remove):
                continue
            hanging.append(f"removal of {volume.data_path}")
            why = f"no answer in {timeout:g} s"
        except OSError as failed:
            why = str(failed)
        warnings.warn(
            f"{volume.data_path} could not be removed ({why}); "
            f"`penstock store rm {volume.path}` will do it when the disk answers again",
            StorageWarning,
            stacklevel=3,
        )
    return hanging


def keep_volumes(parts: Parts, table: bytes, timeout: float) -> list[str]:
    """With the table of extents, and closed whether or not that could be written."""
    first = parts.volumes[0]
    try:
        if not _done_in(timeout, lambda: first.write_block(TABLE_OFFSET, table)):
            _hung.append(parts)
            warnings.warn(
                f"{first.data_path} was kept without its table of extents (no answer in "
                f"{timeout:g} s): what it holds can be had by no name",
                StorageWarning,
                stacklevel=3,
            )
            return [f"table of extents of {first.data_path}"]
    except BaseException:
        _close(parts)
        raise
    _close(parts)
    return []


def _close(parts: Parts) -> None:
    for volume in parts.volumes:
        volume.close()


def _done_in(timeout: float, work: Callable[[], None]) -> bool:
    """Do it where a disk that never answers holds up nobody else. False if the time ran out."""
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            work()
        except BaseException as caught:
            failed.append(caught)

    thread = threading.Thread(target=attempt, name="penstock-store-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or none any more: the interpreter ends
        work()
        return True
    thread.join(timeout)
    if failed:
        raise failed[0]
    return not thread.is_alive()


def abandon(pid: int, engine: _native.StoreEngine, parts: Parts, ledger: Ledger) -> None:
    """A store that was dropped, or is alive at exit: removed all the same, by its maker only."""
    if os.getpid() == pid and not end_engine(engine, LAST_CHANCE, parts, ledger):
        remove_volumes(parts, LAST_CHANCE)


# --------
# Extents on disk, read and written by ticket. Room: hold.


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
