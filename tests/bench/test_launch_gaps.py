"""Gaps of a compute stream are told apart by when the next kernel was launched."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.launch_gaps import compute_stream, gaps, read_trace, report


def kernel(name: str, start: float, length: float, call: int, stream: int = 7) -> dict[str, Any]:
    details = {"stream": stream, "correlation": call}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": details}


def launch(start: float, call: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start, "dur": 2.0,
            "tid": 1, "args": {"correlation": call}}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One kernel in time, one that waits for a copy, one that is launched late, one right after."""
    events = [
        *(launch(at, call) for at, call in ((0, 1), (3, 2), (400, 3), (410, 4))),
        kernel("first", 10, 90, 1),
        kernel("copy", 20, 170, 9, stream=8),
        kernel("waits", 200, 100, 2),
        kernel("late", 403, 50, 3),
        kernel("next", 455, 5, 4),
        {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 0, "dur": 500, "tid": "main"},
    ]
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_the_reason_of_each_gap_is_found(trace: Path) -> None:
    streams, calls = read_trace(trace)
    main = compute_stream(streams)

    found = [(why, length, after.name) for why, length, _, after in gaps(streams[main], calls)]

    assert main == 7
    assert found == [
        ("waited", 100, "waits"), ("launched late", 103, "late"), ("short", 2, "next")
    ]  # fmt: skip


def test_a_report_adds_up_gaps_and_kernels(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(trace, longest=2)

    text = capsys.readouterr().out
    assert "0.5 ms, 4 kernels, 0.2 ms idle" in text
    assert "launched late: 0.1 ms in 1 gaps" in text
    assert "stream 8: 0.2 ms in 1" in text
