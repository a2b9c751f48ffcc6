"""Putting a store together on its paths, all of them or none. Room: hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from penstock import _native
from penstock.storage.engines import EngineChoice
from penstock.storage.errors import DiskFullError, HeaderError, PathError
from penstock.storage.header import DATA_OFFSET, HEADER_NBYTES, Header, parse_header
from penstock.storage.layout import Extent, Layout, make_pattern
from penstock.storage.measure import measure_bandwidth
from penstock.storage.owners import this_process
from penstock.storage.table import TABLE_NBYTES, TABLE_OFFSET, parse_table
from penstock.storage.volume import Volume, create_volume, open_volume
from penstock.units import KiB, MiB, format_bytes, round_up


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
