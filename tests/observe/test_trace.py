"""The Chrome trace: required fields, order, and no open ranges."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.observe.records import (
    Event,
    GpuSample,
    HostSample,
    Observation,
    Phase,
    RecordedRun,
    Sample,
)
from penstock.observe.trace import write_trace

OBSERVATION = Observation(began="2026-11-15T10:00:00Z", command=("python", "train.py"))

PROCESS = RecordedRun(
    OBSERVATION,
    samples=(
        Sample(0.5, 1, "forward", (GpuSample(5, 6, 7, 0.5, 1e9, 2e9),), HostSample(9, 8, 7)),
        Sample(1.5, cpu=(0.5, 1.0), disk={"vda": (100, 200)}, tiers={"hbm": 3, "dram": 4}),
        Sample(2.5, host=HostSample(nodes={"0": 1}), disk={"vda": (300, 200)}),
    ),
    phases=(Phase("forward", 1, 0.0, 1.0), Phase("backward", 1, 1.0, 2.0), Phase("x", 2, 2.0, 3.0)),
    events=(
        Event("h2d", "copy", "a", 0.0, 1.0, 1, "forward", "h2d", 1000, "host", "gpu", True, "w"),
        Event("gpu", "compute", "a", 0.5, 2.0, 1),
        Event("h2d", "copy", "b", 0.5, 1.0, 1, "forward", "h2d", 1000),
        Event("disk:vda", "read", "b", 2.0, 2.0, 1, None, "disk:vda", 10),
    ),
)


def rows_of(run: RecordedRun, folder: Path) -> list[dict[str, Any]]:
    write_trace(run, folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    rows: list[dict[str, Any]] = trace["traceEvents"]
    return rows


def validate(rows: list[dict[str, Any]]) -> None:
    """Check what Perfetto and chrome://tracing require."""
    named = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    reached, open_ranges = 0.0, 0
    ends: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        assert {"ph", "name", "pid", "tid", "ts"} <= row.keys()
        assert row["ph"] in ("X", "C", "M")
        assert isinstance(row["pid"], int)
        assert row["ts"] >= reached or row["ph"] == "M"
        reached = max(reached, row["ts"]) if row["ph"] != "M" else reached
        if row["ph"] == "X":
            assert row["dur"] >= 0
            track = (row["pid"], row["tid"])
            assert track in named
            within = [end for end in ends.get(track, ()) if end > row["ts"]]
            end = round(row["ts"] + row["dur"], 3)
            assert not within or end <= within[-1], "overlaps another range without nesting"
            ends[track] = [*within, end]
        if row["ph"] == "C":
            assert row["args"]
            assert all(isinstance(value, int | float) for value in row["args"].values())
        open_ranges += {"B": 1, "E": -1}.get(row["ph"], 0)
    assert open_ranges == 0


def test_a_trace_is_sorted_and_leaves_no_range_open(tmp_path: Path) -> None:
    validate(rows_of(PROCESS, tmp_path))


def test_overlapping_ranges_get_separate_rows(tmp_path: Path) -> None:
    def copied(start: float, end: float, track: str = "h2d") -> Event:
        return Event(track, "copy", "block", start, end, 1, "forward")

    spans = [copied(0, 5), copied(1, 2), copied(4, 8), copied(4.5, 9), copied(8, 10)]
    run = replace(PROCESS, events=(*spans, copied(0, 3, "gpu")))

    rows = rows_of(run, tmp_path)

    validate(rows)
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    found = [(names[row["tid"]], row["ts"] / 1e6) for row in rows if row.get("cat") == "copy"]
    assert sorted(found) == [
        ("gpu", 0), ("h2d", 0), ("h2d", 1), ("h2d", 8), ("h2d (2)", 4), ("h2d (3)", 4.5),
    ]  # fmt: skip
    assert [names[tid] for tid in sorted(names)][2:] == ["gpu", "h2d", "h2d (2)", "h2d (3)"]


def test_a_trace_has_the_tracks_and_counters_of_the_run(tmp_path: Path) -> None:
    rows = rows_of(PROCESS, tmp_path)

    tracks = [row["args"]["name"] for row in rows if row["name"] == "thread_name"]
    assert tracks == ["steps", "phases", "gpu", "h2d", "disk:vda"]
    assert {row["name"] for row in rows if row["ph"] == "C"} == {
        "gpu 0 memory", "gpu 0 PCIe B/s", "gpu 0 busy", "host memory", "host available",
        "node memory", "tiers", "cores busy", "disk vda B/s", "h2d B/s",
    }  # fmt: skip
    steps = {row["name"]: row["dur"] for row in rows if row.get("cat") == "step"}
    assert steps == {"step 1": 2e6, "step 2": 1e6}


def test_the_integral_of_a_links_rate_is_its_bytes(tmp_path: Path) -> None:
    counted = [row for row in rows_of(PROCESS, tmp_path) if row["name"] == "h2d B/s"]

    moved = sum(
        row["args"]["rate"] * (after["ts"] - row["ts"]) / 1e6
        for row, after in itertools.pairwise(counted)
    )
    assert moved == 2000
    assert counted[-1]["args"]["rate"] == 0


def test_a_disks_rate_is_the_increase_of_its_counter(tmp_path: Path) -> None:
    (row,) = [row for row in rows_of(PROCESS, tmp_path) if row["name"] == "disk vda B/s"]

    assert row["args"] == {"read": 200.0, "write": 0.0}


def test_ranks_and_the_machine_are_separate_processes(tmp_path: Path) -> None:
    machine = Sample(0.1, cpu=(1.0,))
    run = RecordedRun(OBSERVATION, (machine, *PROCESS.samples), PROCESS.phases, PROCESS.events, (),
              {"rank-0": PROCESS, "rank-1": PROCESS})  # fmt: skip
    rows = rows_of(run, tmp_path)

    validate(rows)
    named = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert named == ["rank-0 python train.py", "rank-1 python train.py", "machine"]
    by_process: dict[int, int] = defaultdict(int)
    for row in rows:
        by_process[row["pid"]] += row["name"] == "cores busy"
    assert by_process == {1: 1, 2: 1, 3: 1}
