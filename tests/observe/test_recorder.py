"""The sampling interval adapts to the cost of samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.observe import recorder as recording
from penstock.observe.recorder import CPU_WINDOW, INTERVAL, Recorder
from penstock.observe.samplers import Reading


class Clocks:
    """Wall-clock and thread time that the test controls."""

    def __init__(self) -> None:
        self.wall = self.thread = 100.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.thread

    def time(self) -> float:
        return self.wall


class ExpensiveSampler:
    """A sampler that takes a given CPU time."""

    name, every = "expensive", 1

    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.seconds = clocks, 0.0

    def read(self, into: Reading) -> None:
        self.clocks.thread += self.seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    fake = Clocks()
    monkeypatch.setattr(recording, "time", fake)
    return fake


def pass_time(recorder: Recorder, clocks: Clocks, windows: int = 1) -> None:
    """Sample for some windows over which the CPU time is measured."""
    until = clocks.wall + windows * (CPU_WINDOW + 1)
    while clocks.wall < until:
        recorder._record()
        clocks.wall += recorder.interval


def test_expensive_samples_are_taken_less_often_for_a_while(tmp_path: Path, clocks: Clocks) -> None:
    sampler = ExpensiveSampler(clocks)
    recorder = Recorder(tmp_path, [sampler])
    pass_time(recorder, clocks)
    sampler.seconds = 0.05 * INTERVAL
    pass_time(recorder, clocks, 3)

    assert recorder.interval > INTERVAL
    assert recorder.folder.observation.interval == recorder.interval
    sampler.seconds = 0.0
    pass_time(recorder, clocks, 6)
    assert recorder.interval == INTERVAL
    recorder.stop()
    assert recorder.folder.observation.notes == (
        "some samples are further apart than requested: sampling used more than 2% of a core",
    )


def test_writing_an_exact_step_does_not_slow_down_sampling(tmp_path: Path, clocks: Clocks) -> None:
    sampler = ExpensiveSampler(clocks)
    sampler.seconds = 0.005 * INTERVAL
    recorder = Recorder(tmp_path, [sampler])

    def write() -> None:
        clocks.thread += 1.0

    for _ in range(4):
        recorder.put(write)
        pass_time(recorder, clocks)

    recorder.stop()
    assert clocks.thread > 104.0
    assert recorder.interval == INTERVAL
    assert recorder.folder.observation.notes == ()
