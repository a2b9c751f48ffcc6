"""Measure how fast a path is, so that stripes can be distributed in proportion."""

from __future__ import annotations

import time
from typing import Literal

from penstock import _native
from penstock.memory.arena import Arena
from penstock.storage.engines import wait_for_transfers
from penstock.storage.header import DATA_OFFSET
from penstock.storage.volume import Volume
from penstock.units import MiB

PROBE_NBYTES = 64 * MiB
"""Bytes written, and then read, on each path."""

_WINDOW = 16 * MiB
"""Size of one transfer."""


def measure_bandwidth(volume: Volume, engine_name: Literal["io_uring", "threads"]) -> float:
    """Return bytes per second of equal amounts of writes and reads, as in an optimizer sweep."""
    volume.reserve(PROBE_NBYTES)
    volume.is_new = False  # the probe's bytes stay in the file
    arena = Arena(_WINDOW)
    window = arena.take(_WINDOW, align=_native.UNIT_NBYTES)
    engine = _native.StoreEngine(engine_name, [volume.fd], volume.alignment, 1 * MiB, 16, 1)
    seconds = 0.0
    try:
        # Do not time the first write: it also allocates the file system's metadata.
        _transfer_all(engine, window, write=True)
        for write in (True, False):
            start = time.perf_counter()
            _transfer_all(engine, window, write=write)
            seconds += time.perf_counter() - start
    finally:
        engine.close(10.0)
    return 2 * PROBE_NBYTES / seconds


def _transfer_all(engine: _native.StoreEngine, window: _native.Block, *, write: bool) -> None:
    for offset in range(0, PROBE_NBYTES, _WINDOW):
        pieces = [(0, DATA_OFFSET + offset, 0, _WINDOW, 0)]
        transfer = engine.start(write, window.address, pieces, None)
        wait_for_transfers(engine, [transfer])
        if transfer.failure:
            code = transfer.failure[0]
            verb = "writing" if write else "reading"
            raise OSError(code, f"{verb} failed while the path's bandwidth was measured")
