"""GPU memory of this process alone.

`torch.cuda.mem_get_info` counts every process on the card, so a test that compares it before and
after fails whenever another process allocates or ends.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.kv.address_space import CudaSpace
from penstock.machine.discovery.gpus import open_nvml
from penstock.observe.samplers import visible_gpus


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Bytes of GPU memory that this process has allocated."""

    allocated: int
    """What torch's allocator has reserved, and the pages of `CudaSpace` that exist: created and not
    released, or still mapped."""

    driver: int | None
    """The driver's figure for this process, with the CUDA context; None if it reports none, as in
    some containers."""


class PageCounter:
    """Counts the pages that exist by the rules of the driver, from the calls of `CudaSpace`."""

    def __init__(self) -> None:
        self._page_nbytes = 0
        self._unreleased: set[int] = set()
        self._mapped: dict[int, int] = {}
        self._lock = threading.Lock()  # a cache maps pages in a thread of its own

    def count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        with self._lock:
            match name:
                case "cuMemCreate":
                    self._page_nbytes = int(args[0])
                    self._unreleased.add(int(result))
                case "cuMemRelease":
                    self._unreleased.discard(int(args[0]))
                case "cuMemMap":
                    self._mapped[int(args[0])] = int(args[3])
                case "cuMemUnmap":
                    start, nbytes = int(args[0]), int(args[1])
                    for address in [a for a in self._mapped if start <= a < start + nbytes]:
                        del self._mapped[address]

    @property
    def nbytes(self) -> int:
        # A released page keeps its memory until it is no longer mapped anywhere.
        return self._page_nbytes * len(self._unreleased | set(self._mapped.values()))

    def measure(self) -> OwnMemory:
        """Release what is only cached, and measure."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return OwnMemory(torch.cuda.memory_reserved() + self.nbytes, driver_bytes())


@contextmanager
def counted_pages() -> Iterator[PageCounter]:
    """Count the pages of every `CudaSpace` that is used inside the `with` block."""
    counter, call = PageCounter(), CudaSpace._call

    def counted(space: CudaSpace, name: str, *args: Any) -> Any:
        result = call(space, name, *args)
        counter.count(name, args, result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaSpace, "_call", counted)
        yield counter


def driver_bytes() -> int | None:
    """Return the bytes that the driver reports for this process on the current GPU."""
    with open_nvml() as nvml:
        if nvml is None:
            return None
        handle = visible_gpus(nvml)[torch.cuda.current_device()]
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return None
        used = [p.usedGpuMemory for p in processes if p.pid == os.getpid()]
        return int(used[0]) if used and used[0] is not None else None
