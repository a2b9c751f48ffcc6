"""Measure how many bytes of memory an optimizer sweep and the copies of a GPU move together.

Each alone says little about both: cores reach a limit of their own before memory does. Plans that
let the GPU sweep some of the blocks in host memory depend on this figure.
"""

from __future__ import annotations

import threading
import time
from functools import partial

from penstock.machine.machine import Figure, MemoryRate
from penstock.probe.copies import Copier, Copy
from penstock.probe.measurement import Effort, Progress, figure
from penstock.probe.sweep import SweepBuffers
from penstock.units import MiB

SAMPLES = 3
"""Number of samples, each as long as a slice."""

NBYTES = 64 * MiB
"""Size of a copy: about one role of a piece that the GPU sweeps."""

COPIES = 4
"""Number of copies in each direction that are issued without waiting."""


def probe_shared(
    node: int,
    gpu: int,
    buffers: tuple[SweepBuffers, int],
    threads: int,
    copier: Copier,
    effort: Effort,
    progress: Progress,
) -> MemoryRate | None:
    """Measure a sweep with all threads while a GPU copies in both directions."""
    copy = Copy(direction="both", gpus=(gpu,), nbytes=min(NBYTES, copier.max_nbytes), streams=1)
    what = f"node {node}: sweep, and GPU {gpu} copies in both directions"
    rate = progress.measure(what, partial(_rate, buffers, threads, copier, copy, effort))
    if rate is None:
        return None
    return MemoryRate(operation="shared", threads=threads, bytes_per_second=rate)


def _rate(
    buffers: tuple[SweepBuffers, int], threads: int, copier: Copier, copy: Copy, effort: Effort
) -> Figure:
    both = partial(_sample, *buffers, threads, copier, copy, effort.slice_seconds)
    both()  # the first run warms up
    return figure([both() for _ in range(SAMPLES)])


def _sample(
    buffers: SweepBuffers, size: int, threads: int, copier: Copier, copy: Copy, seconds: float
) -> float:
    """Return the bytes per second of sweeps and copies that run for `seconds`."""
    stop = threading.Event()
    swept: list[float] = []

    def sweep() -> None:
        while not stop.is_set():
            buffers.seconds(size, threads)
            swept.append(size * buffers.traffic)

    thread = threading.Thread(target=sweep, name="probe sweep")
    start, copied = time.perf_counter(), 0
    thread.start()
    try:
        while time.perf_counter() - start < seconds:
            copier.seconds(copy, COPIES)
            copied += COPIES * copy.all_bytes
        moved, took = copied + sum(swept), time.perf_counter() - start
    finally:
        stop.set()
        thread.join()
    return moved / took
