"""Events read from a trace of torch's profiler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.observe import torch_profiler
from penstock.observe.recorder import Recorder
from penstock.observe.records import Event
from penstock.observe.torch_profiler import MARK, ExactSteps, events_of

BASE = 5_000_000.0
"""The profiler's clock in microseconds when ours is at 2 s."""


def ranged(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": BASE + ts, "dur": dur,
            "args": args}  # fmt: skip


def copied(name: str, ts: float, dur: float, correlation: int, nbytes: int) -> dict[str, Any]:
    return ranged("gpu_memcpy", f"Memcpy {name}", ts, dur, 7, device=0, stream=7,
                  correlation=correlation, bytes=nbytes)  # fmt: skip


def launched(ts: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return ranged("cuda_runtime", "cudaMemcpyAsync", ts, 5, tid, correlation=correlation, cbid=41)


TRACE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "a GPU"}],
    "traceEvents": [
        {
            "ph": "M",
            "name": "process_name",
            "pid": 1,
            "tid": 0,
            "ts": 0,
            "args": {"name": "python"},
        },
        ranged("user_annotation", MARK, 0, 1),
        ranged("user_annotation", "ProfilerStep#3", 0, 5000),
        # The batch, copied from pageable memory in forward.
        ranged("cpu_op", "aten::to", 100, 50),
        ranged("cpu_op", "aten::copy_", 110, 30),
        launched(120, 11),
        copied("HtoD (Pageable -> Device)", 130, 40, 11, 4096),
        # Two kernels close together, and a later one.
        ranged("cpu_op", "aten::mm", 200, 20),
        ranged("cuda_runtime", "cudaLaunchKernel", 205, 3, correlation=12),
        ranged("cuda_runtime", "cudaLaunchKernel", 209, 3, correlation=13),
        ranged("kernel", "short", 300, 10, 7, correlation=12, stream=7),
        ranged("kernel", "long", 315, 100, 7, correlation=13, stream=7),
        ranged("kernel", "late", 900, 10, 7, stream=7),
        # Gradients offloaded by an autograd thread, and states copied in the optimizer.
        ranged("cpu_op", "autograd::engine::evaluate_function: ToCopyBackward0", 1100, 50, 2),
        launched(1110, 14, tid=2),
        copied("DtoH (Device -> Pinned)", 1200, 80, 14, 1 << 20),
        ranged("user_annotation", "Optimizer.step#AdamW.step", 2000, 500),
        ranged("cpu_op", "aten::copy_", 2100, 30),
        launched(2105, 15),
        copied("HtoD (Pinned -> Device)", 2200, 10, 15, 512),
        copied("DtoD (Device -> Device)", 2300, 10, 99, 64),
        {"ph": "f", "id": 14, "pid": 1, "tid": 7, "ts": BASE, "cat": "ac2g", "name": "ac2g"},
    ],
    "traceName": "trace.json",
    "displayTimeUnit": "ms",
}


def phase_at(at: float) -> str:
    return "forward" if at < 2.001 else "backward" if at < 2.002 else "update"


def read() -> list[Event]:
    marks = [(2.0, 2.0 + 1e-6)]
    return events_of(json.loads(json.dumps(TRACE)), marks, step=3, phase_at=phase_at)


def test_copies_have_bytes_direction_memory_kind_phase_and_cause() -> None:
    copies = [event for event in read() if event.kind == "copy"]

    assert [(e.link, e.nbytes, e.source, e.target, e.pinned, e.phase, e.where) for e in copies] == [
        ("h2d", 4096, "host", "gpu", False, "forward", "aten::to"),
        ("d2h", 1 << 20, "gpu", "host", True, "backward",
         "autograd::engine::evaluate_function: ToCopyBackward0"),
        ("h2d", 512, "host", "gpu", True, "update", "Optimizer.step#AdamW.step"),
        (None, 64, "gpu", "gpu", None, "update", None),
    ]  # fmt: skip
    assert {event.step for event in copies} == {3}


def test_times_are_converted_to_our_clock() -> None:
    first = read()[0]

    assert first.start == pytest.approx(2.0 + 130e-6)
    assert first.end == pytest.approx(2.0 + 170e-6)


def test_a_slow_first_mark_does_not_shift_the_times() -> None:
    """The first mark began 500 us after its first time, as when torch loads an operator."""
    events = [
        ranged("user_annotation", MARK, 500, 300),
        ranged("user_annotation", MARK, 1010, 5),
        ranged("user_annotation", MARK, 1032, 5),
        launched(1100, 11),
        copied("HtoD (Pinned -> Device)", 1200, 40, 11, 4096),
    ]
    marks = [(2.0, 2.0 + 900e-6), (2.0 + 1006e-6, 2.0 + 1017e-6), (2.0 + 1030e-6, 2.0 + 1041e-6)]
    phases = {True: "copies", False: "before"}

    (copy,) = events_of(
        {"traceEvents": events}, marks, 3, lambda at: phases[at >= 2.0 + 1090e-6]
    )  # fmt: skip

    assert copy.start == pytest.approx(2.0 + 1200e-6, abs=2e-6)
    assert copy.phase == "copies"


def test_kernels_without_a_gap_are_one_event_named_after_the_longest() -> None:
    kernels = [event for event in read() if event.kind == "kernel"]

    assert [(event.name, event.track) for event in kernels] == [("long", "gpu"), ("late", "gpu")]
    assert kernels[0].start == pytest.approx(2.0 + 300e-6)
    assert kernels[0].end == pytest.approx(2.0 + 415e-6)


def test_a_trace_without_our_marks_is_rejected() -> None:
    with pytest.raises(ValueError, match="0 of the 1 ranges"):
        events_of({"traceEvents": []}, [(0.0, 1.0)], 1, phase_at)


def test_a_real_trace_is_converted_to_our_clock_within_microseconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges after the marks must lie between times read just before and just after them."""
    read: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch_profiler, "events_of", lambda *args: read.append(args) or [])
    recorder = Recorder(tmp_path, [], origin=0.0)
    exact = ExactSteps((1,), recorder)
    exact.begin(1)
    times = []
    for number in range(20):
        before = time.perf_counter()
        with torch.profiler.record_function(f"later {number}"):
            pass
        times.append((before, time.perf_counter()))
    exact.end()

    ((trace, marks, step, _),) = read
    assert step == 1
    shift = torch_profiler._clock_shift(trace["traceEvents"], marks)
    rows = {e["name"]: e["ts"] / 1e6 + shift for e in trace["traceEvents"] if e.get("ph") == "X"}
    for number, (before, after) in enumerate(times):
        assert before - 20e-6 <= rows[f"later {number}"] <= after + 20e-6
    assert "user_annotation" in {e.get("cat") for e in trace["traceEvents"]}
