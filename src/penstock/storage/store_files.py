"""Create the files or devices of a store, all of them or none, and remove them again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from penstock.storage.bandwidth import measure_bandwidth
from penstock.storage.engines import EngineChoice
from penstock.storage.errors import DiskFullError, PathError, StorageWarning
from penstock.storage.header import DATA_OFFSET, Header
from penstock.storage.layout import Layout, make_pattern
from penstock.storage.leftovers import current_owner
from penstock.storage.volume import Volume, create_volume
from penstock.units import KiB, MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings of a store that rarely need to change."""

    weights: Sequence[float] | None = None
    """Bandwidth of each path, in any unit, which is its weight in the distribution of stripes.
    Measured if None and there are several paths."""
    unit: int = 64 * KiB
    """Smallest part of an extent that can be read or written alone. It has its own checksum."""
    stripe_nbytes: int = 2 * MiB
    """Size of the stripes that are distributed over the paths."""
    request_nbytes: int = 1 * MiB
    """Maximum size of one request to the OS."""
    depth: int = 16
    """Requests in flight per path."""
    workers: int = 2
    """Threads that serve io_uring. One thread cannot compute the checksums of a fast disk. The
    threads engine has one thread per request instead."""


@dataclass(slots=True)
class StoreFiles:
    """The open, locked paths of a store and the layout of its bytes on them."""

    uuid: UUID
    volumes: list[Volume]
    layout: Layout
    capacity: int


def create_store_files(
    paths: Sequence[str | Path],
    capacity: int | None,
    options: StoreOptions,
    *,
    engine: EngineChoice,
    erase: bool,
) -> StoreFiles:
    """Create files or claim devices, with headers and all of their space.

    Without a capacity, use all of the raw devices. A failure leaves nothing behind.
    """
    _check_arguments(paths, capacity, options)
    uuid = uuid4()
    volumes: list[Volume] = []
    try:
        # Until the layout is known, a provisional header names the owner.
        provisional = _provisional_header(uuid)
        for path in paths:
            volumes.append(create_volume(path, uuid, provisional, erase=erase))
        layout = _choose_layout(volumes, options, engine)
        capacity = capacity or _largest_capacity(volumes, layout)
        for volume, nbytes in zip(volumes, layout.path_nbytes(capacity), strict=True):
            volume.reserve(nbytes)
        for index, volume in enumerate(volumes):
            header = dataclasses.replace(
                provisional,
                capacity=capacity,
                data_nbytes=volume.reserved,
                unit=layout.unit,
                alignment=layout.alignment,
                stripe_nbytes=layout.stripe_nbytes,
                path=index,
                pattern=layout.pattern,
            )
            volume.write_block(0, header.to_bytes())
    except BaseException:
        for volume in volumes:
            with contextlib.suppress(OSError):
                volume.remove()
        raise
    return StoreFiles(uuid, volumes, layout, capacity)


def remove_store_files(files: StoreFiles, timeout: float) -> list[str]:
    """Remove a store from every disk that responds. Return, and warn about, removals that hang.

    A disk that does not respond keeps its part of the store, for `penstock store rm`.
    """
    hanging = []
    for volume in files.volumes:
        try:
            if _finishes_within(timeout, volume.remove):
                continue
            hanging.append(f"removal of {volume.data_path}")
            why = f"no response in {timeout:g} s"
        except OSError as error:
            why = str(error)
        warnings.warn(
            f"{volume.data_path} could not be removed ({why}); run "
            f"`penstock store rm {volume.path}` when the disk responds again",
            StorageWarning,
            stacklevel=3,
        )
    return hanging


def _check_arguments(
    paths: Sequence[str | Path], capacity: int | None, options: StoreOptions
) -> None:
    if not paths:
        raise PathError("a store", "needs at least one path")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise PathError(", ".join(map(str, paths)), "the same path is listed twice")
    if capacity is not None and capacity < 1:
        raise PathError(str(paths[0]), f"capacity must be at least 1 B, got {capacity}")
    if capacity is None and not all(Path(path).is_block_device() for path in paths):
        raise PathError(str(paths[0]), "a capacity is required unless every path is a raw device")
    if options.weights is not None and len(options.weights) != len(paths):
        raise PathError(
            str(paths[0]), f"there are {len(options.weights)} weights for {len(paths)} paths"
        )


def _choose_layout(
    volumes: Sequence[Volume], options: StoreOptions, engine: EngineChoice
) -> Layout:
    bandwidths = options.weights
    if bandwidths is None:
        alone = len(volumes) == 1
        bandwidths = [1.0 if alone else measure_bandwidth(v, engine.name) for v in volumes]
    alignment = max(volume.alignment for volume in volumes)
    unit = max(options.unit, alignment)
    return Layout(
        pattern=make_pattern(bandwidths),
        alignment=alignment,
        unit=unit,
        stripe_nbytes=max(options.stripe_nbytes, unit),
    )


def _largest_capacity(volumes: Sequence[Volume], layout: Layout) -> int:
    """Return the largest capacity for which every raw device can hold its share."""
    available = [os.lseek(volume.fd, 0, os.SEEK_END) - DATA_OFFSET for volume in volumes]
    if layout.num_paths == 1:
        capacity = available[0] // layout.alignment * layout.alignment
    else:
        per_round = [
            layout.pattern.count(path) * layout.stripe_nbytes for path in range(len(available))
        ]
        rounds = min(a // p for a, p in zip(available, per_round, strict=True))
        capacity = rounds * layout.round_nbytes
    if capacity < 1:
        raise DiskFullError(
            path=volumes[0].path, wanted=layout.round_nbytes, free=max(0, min(available))
        )
    return capacity


def _provisional_header(uuid: UUID) -> Header:
    """Build a header that names this process as the owner and has placeholders for the layout."""
    owner = current_owner()
    block = 64 * KiB
    return Header(
        uuid=uuid, boot=owner.boot, pid=owner.pid, started=owner.started, host=owner.host,
        created_ns=time.time_ns(), capacity=block, data_nbytes=block, unit=block, alignment=block,
        stripe_nbytes=block, path=0, pattern=(0,),
    )  # fmt: skip


def _finishes_within(timeout: float, work: Callable[[], None]) -> bool:
    """Run `work` in a thread, so that a hung disk cannot block the caller.

    Return False if the timeout expires first; the thread then continues as a daemon. Raise what
    `work` raises.
    """
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, name="penstock-store-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # out of threads, or the interpreter is shutting down
        work()
        return True
    thread.join(timeout)
    if errors:
        raise errors[0]
    return not thread.is_alive()
