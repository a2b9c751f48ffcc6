"""How fast a path is, so that stripes can be dealt in proportion. Room: hold."""

from __future__ import annotations

import time
from typing import Literal

from penstock import _native
from penstock.memory.arena import Arena
from penstock.storage.header import DATA_OFFSET
from penstock.storage.volume import Volume
from penstock.units import MiB

PROBE_NBYTES = 64 * MiB
_WINDOW = 16 * MiB


def measure_bandwidth(volume: Volume, engine_name: Literal["io_uring", "threads"]) -> float:
    """Bytes a second, writing and then reading what was written: half of each, as the sweep."""
    volume.reserve(PROBE_NBYTES)
    arena = Arena(_WINDOW)
    window = arena.take(_WINDOW, align=_native.UNIT_NBYTES)
    engine = _native.StoreEngine(engine_name, [volume.fd], volume.alignment, 1 * MiB, 16, 1)
    seconds = 0.0
    try:
        _pass(engine, window, write=True)  # the first write of new space pays for its metadata
        for write in (True, False):
            began = time.perf_counter()
            _pass(engine, window, write=write)
            seconds += time.perf_counter() - began
    finally:
        engine.close(10.0)
    return 2 * PROBE_NBYTES / seconds


def _pass(engine: _native.StoreEngine, window: _native.Block, *, write: bool) -> None:
    for done in range(0, PROBE_NBYTES, _WINDOW):
        pieces = [(0, DATA_OFFSET + done, 0, _WINDOW, 0)]
        transfer = engine.start(write, window.address, pieces, None)
        while not engine.wait([transfer], True, 0.1):
            pass  # a look at the signals between two slices
        if transfer.failure:
            code = transfer.failure[0]
            raise OSError(code, f"{'writing' if write else 'reading'} the probe")
