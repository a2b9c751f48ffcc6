"""Measure what a run uses: host memory, device memory, disk traffic and time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

_SECTOR = 512
"""Unit of /proc/diskstats in bytes, independent of the device's block size."""

Batch = Mapping[str, torch.Tensor]


class HostPeak:
    """Context manager that measures the peak host memory as the largest drop of MemAvailable.

    MemAvailable is sampled at 50 Hz. Its drop counts pinned, anonymous and driver memory but not
    the page cache, and it counts all processes: nothing else should run on the machine.
    """

    def __enter__(self) -> Self:
        self.before = self.least = available()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        return self.before - self.least

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.least = min(self.least, available())


def available() -> int:
    """Return MemAvailable in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")


def disk_bytes(path: Path) -> tuple[int, int] | None:
    """Return the bytes that the device of `path` has read and written, None if not counted."""
    number = path.stat().st_dev
    device = (str(os.major(number)), str(os.minor(number)))
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if (words[0], words[1]) == device:
            return int(words[5]) * _SECTOR, int(words[9]) * _SECTOR
    return None


def device_peak() -> tuple[int, int]:
    """Return torch's peak allocated and reserved bytes since the last reset."""
    if not torch.cuda.is_available():
        return 0, 0
    return int(torch.cuda.max_memory_allocated()), int(torch.cuda.max_memory_reserved())


def forget_device_peak() -> None:
    """Release cached device memory and reset the peak."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run_steps(
    step: Callable[[Batch], object], batches: Sequence[Batch]
) -> tuple[list[float], list[float]]:
    """Run the steps and return the seconds and the loss of each.

    `step` must return only when the loss is known on the host, or the times would be those of
    launching kernels.
    """
    seconds: list[float] = []
    losses: list[float] = []
    for batch in batches:
        began = time.perf_counter()
        losses.append(float(step(batch)))  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - began)
        print(f"  {seconds[-1]:.3f} s  loss {losses[-1]:.4f}", flush=True)
    return seconds, losses
