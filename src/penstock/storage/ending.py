"""How a store ends, whatever its devices do. Room: hold."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable

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
