"""Helpers for tests of the probe: short efforts, and links and GPUs of known speed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.machine.machine import MemoryNode
from penstock.probe import session, storage, sweep
from penstock.probe.measurement import Effort
from penstock.units import GiB, KiB, MiB

TINY = Effort(slice_seconds=0.004, host_bytes=16 * MiB)
NODE = MemoryNode(id=0, kind="dram", capacity=GiB)


def make_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make probes use very little time, memory and disk space."""
    monkeypatch.setattr(session, "choose_effort", lambda num_figures, quick: TINY)
    monkeypatch.setattr(sweep, "QUICK_SLICES", 10**6)  # a busy machine must not skip a figure
    monkeypatch.setattr(storage, "MAX_FILE_BYTES", 4 * MiB)
    monkeypatch.setattr(storage, "FILL_BLOCK", MiB)
    few_requests = tuple(
        storage.Request(op, 64 * KiB, depth) for op in ("write", "read", "both") for depth in (1, 3)
    )
    monkeypatch.setattr(storage, "requests", lambda quick: few_requests)


@contextlib.contextmanager
def no_thread_is_left() -> Iterator[None]:
    """Assert that the number of threads of this process, including native ones, does not grow."""
    before = len(os.listdir("/proc/self/task"))
    yield
    end = time.monotonic() + 10  # a thread disappears from the list shortly after it ends
    while len(os.listdir("/proc/self/task")) > before:
        assert time.monotonic() < end, "a thread is still running"
        time.sleep(0.01)


@dataclass
class FakeCopier:
    """Each GPU has a link with 50 GB/s in each direction; the node's memory allows 120 GB/s."""

    max_nbytes: int = 64 * MiB

    def seconds(self, copy, count):
        ways = len(copy.gpus) * (2 if copy.direction == "both" else 1)
        return count * ways * copy.nbytes / min(50e9 * ways, 120e9)


@dataclass
class FakeGpuBenchmark:
    """A GPU with fixed rates for each figure. The figure `lacks` raises an out-of-memory error."""

    lacks: str = ""

    def work(self, what):
        return 10**9

    def seconds(self, what, count):
        if what == self.lacks:
            raise RuntimeError("out of memory")
        rates = {
            "matmul_flops": 100e12,
            "block_flops": 60e12,
            "compiled_flops": 70e12,
            "attention_flops": 50e12,
            "memory_bandwidth": 1e12,
        }
        return count * self.work(what) / rates[what]
