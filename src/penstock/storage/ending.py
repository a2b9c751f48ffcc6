"""How a store ends, whatever its devices do. Room: hold."""

from __future__ import annotations

import os
import warnings

from penstock import _native
from penstock.storage.building import Parts
from penstock.storage.errors import StorageWarning
from penstock.storage.ledger import Ledger
from penstock.storage.table import TABLE_OFFSET
from penstock.storage.tickets import describe_hanging

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


def remove_volumes(parts: Parts) -> None:
    """From every disk that still answers; one that does not keeps a store for `store rm`."""
    for volume in parts.volumes:
        try:
            volume.remove()
        except OSError as failed:
            warnings.warn(
                f"{volume.data_path} could not be removed ({failed}); "
                f"`penstock store rm {volume.path}` will do it when the disk answers again",
                StorageWarning,
                stacklevel=3,
            )


def keep_volumes(parts: Parts, table: bytes) -> None:
    """With the table of extents, and closed whether or not that could be written."""
    try:
        parts.volumes[0].write_block(TABLE_OFFSET, table)
    finally:
        for volume in parts.volumes:
            volume.close()


def abandon(pid: int, engine: _native.StoreEngine, parts: Parts, ledger: Ledger) -> None:
    """A store that was dropped, or is alive at exit: removed all the same, by its maker only."""
    if os.getpid() == pid and not end_engine(engine, LAST_CHANCE, parts, ledger):
        remove_volumes(parts)
