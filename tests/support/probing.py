"""What the probe's tests share: efforts that take a moment, and links of known speed."""

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
    """Probes that take a moment and next to no memory or space."""
    monkeypatch.setattr(session, "choose_effort", lambda num_figures, quick: TINY)
    monkeypatch.setattr(sweep, "QUICK_SLICES", 10**6)  # a busy machine must not cost a figure
    monkeypatch.setattr(storage, "MAX_FILE_BYTES", 4 * MiB)
    monkeypatch.setattr(storage, "FILL_BLOCK", MiB)
    few = tuple(
        storage.Request(op, 64 * KiB, depth) for op in ("write", "read", "both") for depth in (1, 3)
    )
    monkeypatch.setattr(storage, "requests", lambda quick: few)


@contextlib.contextmanager
def no_thread_stays() -> Iterator[None]:
    """The kernel's count of this process's threads, the native ones among them, does not grow."""
    before = len(os.listdir("/proc/self/task"))
    yield
    end = time.monotonic() + 10  # a thread is gone from there a little after it ended
    while len(os.listdir("/proc/self/task")) > before:
        assert time.monotonic() < end, "a thread stays"
        time.sleep(0.01)


@dataclass
class FakeCopier:
    """Every GPU has its own link of 50 GB/s each way; a node's memory gives 120 GB/s in all."""

    room: int = 64 * MiB

    def seconds(self, copy, count):
        ways = len(copy.gpus) * (2 if copy.direction == "both" else 1)
        return count * ways * copy.nbytes / min(50e9 * ways, 120e9)


@dataclass
class FakeCalculator:
    """100 TFLOP/s in products, 60 in a layer, 70 in a compiled one, 50 in attention, 1 TB/s of
    memory; `lacks` is refused."""

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
