"""The record of a start: every moment belongs to one phase."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import startup
from penstock.engine.prepare import prepare
from penstock.engine.startup import OTHER, Phase, StartUp, process_age
from penstock.machine.sysfs import System
from tests.support.engines import plain_model, tiny_config

BUDGET = {"hbm": "64MiB", "dram": "64MiB"}
SMALL: dict[str, Any] = {"context": 32, "batch": 2, "device": "cpu", "budget": BUDGET}


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(before: float = 0.0) -> tuple[StartUp, Clock]:
    clock = Clock()
    return StartUp(before, clock=clock), clock


def test_a_phase_has_its_start_and_its_seconds() -> None:
    start_up, clock = record()
    with start_up.phase("plan"):
        clock.now += 2.0
    clock.now += 1.0
    with start_up.phase("weights"):
        clock.now += 4.0
    assert start_up.phases == [Phase("plan", 0.0, 2.0), Phase("weights", 3.0, 4.0),
                               Phase(OTHER, 0.0, 1.0)]  # fmt: skip


def test_an_inner_phase_is_no_part_of_the_outer_one() -> None:
    start_up, clock = record()
    with start_up.phase("weights"):
        clock.now += 1.0
        with start_up.phase("optimizer states"):
            clock.now += 5.0
        clock.now += 2.0
    assert start_up.by_name() == {"weights": 3.0, "optimizer states": 5.0}


def test_a_phase_that_is_entered_again_adds_up() -> None:
    start_up, clock = record()
    for _ in range(3):
        with start_up.phase("store"):
            clock.now += 1.5
    assert start_up.phases == [Phase("store", 0.0, 4.5)]


def test_the_time_before_the_record_is_import() -> None:
    start_up, clock = record(before=7.0)
    clock.now += 1.0
    with start_up.phase("plan"):
        clock.now += 2.0
    assert start_up.phases == [Phase("import", 0.0, 7.0), Phase("plan", 8.0, 2.0),
                               Phase(OTHER, 0.0, 1.0)]  # fmt: skip
    assert start_up.seconds == 10.0


def test_phases_add_up_to_the_time_that_has_passed() -> None:
    began = time.perf_counter()
    start_up = StartUp()
    with start_up.phase("plan"), start_up.phase("survey"):
        time.sleep(0.01)
    time.sleep(0.01)
    start_up.end()
    passed = time.perf_counter() - began
    assert sum(phase.seconds for phase in start_up.phases) == pytest.approx(start_up.seconds)
    assert 0.02 <= start_up.seconds <= passed


def test_nothing_is_added_after_the_end() -> None:
    start_up, clock = record()
    with start_up.phase("first step"):
        clock.now += 1.0
        start_up.end()
        clock.now += 50.0
    with start_up.phase("plan"):
        clock.now += 1.0
    start_up.end()
    assert start_up.complete
    assert start_up.phases == [Phase("first step", 0.0, 1.0)]


def test_a_phase_that_fails_is_closed() -> None:
    start_up, clock = record()

    def fail() -> None:
        with start_up.phase("host memory"):
            clock.now += 1.0
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fail()
    clock.now += 2.0
    with start_up.phase("weights"):
        clock.now += 4.0
    assert start_up.by_name() == {"host memory": 1.0, "weights": 4.0, OTHER: 2.0}


def test_other_threads_add_nothing() -> None:
    start_up, clock = record()

    def work() -> None:
        with start_up.phase("pin"):
            clock.now += 3.0

    with start_up.phase("weights"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert start_up.by_name() == {"weights": 3.0}


def test_the_age_of_a_process_is_that_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = " ".join(str(n) for n in range(4, 60))  # field 22 is the start, in ticks
    (tmp_path / "proc/self").mkdir(parents=True)
    fields = numbers.split()
    fields[22 - 4] = "500"
    text = f"7 (python) with) spaces) S {' '.join(fields)}"
    (tmp_path / "proc/self/stat").write_text(text)
    clock: Any = lambda _: 12.5  # noqa: E731
    monkeypatch.setattr(startup.time, "clock_gettime", clock)
    monkeypatch.setattr(startup.os, "sysconf", lambda _: 100)
    assert process_age(System(tmp_path)) == 7.5
    (tmp_path / "proc/self/stat").write_text("7 (python)")
    assert process_age(System(tmp_path)) == 0.0


def test_this_process_has_an_age() -> None:
    assert 0.0 < process_age() < 1e6


def test_an_engine_records_every_phase_in_order() -> None:
    began = time.perf_counter()
    batch = {"input_ids": torch.ones(2, 32, dtype=torch.long)}
    with prepare(plain_model(tiny_config("llama")), rehearse=True, **SMALL) as engine:
        assert not engine.start_up.complete
        engine.step(batch)
        passed = time.perf_counter() - began
        engine.step(batch)
        found = engine.start_up
    assert [phase.name for phase in found.phases] == [
        "import", "survey", "plan", "model", "device", "self-check", "rehearsal", "host memory",
        "HBM", "store", "pin", "weights", "optimizer states", "first step", OTHER,
    ]  # fmt: skip
    assert found.complete
    assert sum(phase.seconds for phase in found.phases) == pytest.approx(found.seconds)
    assert found.seconds <= passed


def test_a_record_of_the_caller_goes_on_in_prepare() -> None:
    start_up, model = StartUp(before=3.0), plain_model(tiny_config("llama"))
    with prepare(model, start_up=start_up, self_check=False, **SMALL) as engine:
        assert engine.start_up is start_up
    assert start_up.by_name()["import"] >= 3.0
    assert "self-check" not in start_up.by_name()
