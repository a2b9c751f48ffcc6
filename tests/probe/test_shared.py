"""A sweep and copies of a GPU run at the same time, and the bytes of both count."""

from __future__ import annotations

import threading
import time

from penstock.errors import ProbeError
from penstock.probe.copies import Copy
from penstock.probe.measurement import Effort, Progress
from penstock.probe.shared import COPIES, NBYTES, probe_shared
from penstock.units import GiB, MiB

EFFORT = Effort(slice_seconds=0.2, host_bytes=GiB)


class Buffers:
    """A sweep that sleeps."""

    traffic = 26.0

    def __init__(self) -> None:
        self.running = False
        self.calls: list[tuple[int, int]] = []

    def seconds(self, parameters: int, threads: int) -> float:
        self.running = True
        self.calls.append((parameters, threads))
        time.sleep(0.01)
        self.running = False
        return 0.01


class Copier:
    """Copies that sleep, and note whether a sweep was running."""

    def __init__(self, buffers: Buffers, max_nbytes: int = GiB) -> None:
        self.max_nbytes, self._buffers = max_nbytes, buffers
        self.copies: list[tuple[Copy, int]] = []
        self.saw_sweep = False

    def seconds(self, copy: Copy, count: int) -> float:
        self.copies.append((copy, count))
        for _ in range(10):
            self.saw_sweep |= self._buffers.running
            time.sleep(0.001)
        return 0.01


def test_sweeps_run_while_the_gpu_copies_both_ways() -> None:
    buffers = Buffers()
    copier = Copier(buffers)

    rate = probe_shared(0, 0, (buffers, 1000), 8, copier, EFFORT, Progress(1, None))

    assert rate is not None
    assert (rate.operation, rate.threads, rate.moments) == ("shared", 8, None)
    assert copier.saw_sweep
    assert set(buffers.calls) == {(1000, 8)}
    copy = Copy(direction="both", gpus=(0,), nbytes=NBYTES, streams=1)
    assert set(copier.copies) == {(copy, COPIES)}
    assert rate.bytes_per_second.median > 0
    assert not any(thread.name == "probe sweep" for thread in threading.enumerate())


def test_copies_are_no_larger_than_the_buffers() -> None:
    buffers = Buffers()
    copier = Copier(buffers, max_nbytes=4 * MiB)

    probe_shared(0, 0, (buffers, 1000), 8, copier, EFFORT, Progress(1, None))

    assert {copy.nbytes for copy, _ in copier.copies} == {4 * MiB}


def test_a_copy_that_fails_ends_the_sweeps_and_leaves_a_note() -> None:
    buffers, progress = Buffers(), Progress(1, None)

    class Failing(Copier):
        def seconds(self, copy: Copy, count: int) -> float:
            raise ProbeError("no link")

    assert probe_shared(0, 0, (buffers, 1000), 8, Failing(buffers), EFFORT, progress) is None
    assert any("no link" in note for note in progress.notes)
    assert not any(thread.name == "probe sweep" for thread in threading.enumerate())
