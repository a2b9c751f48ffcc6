"""A run's directory: written, rotated, damaged, and read back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.observe.errors import ObserveError
from penstock.observe.record_lines import line_of, parse_line
from penstock.observe.records import (
    Event,
    GpuInfo,
    GpuSample,
    Hardware,
    HostSample,
    NodeInfo,
    Observation,
    Phase,
    Planned,
    PlannedTier,
    Sample,
)
from penstock.observe.run_files import LineFile, RunFolder, read_run
from penstock.units import GiB, MiB

OBSERVATION = Observation(
    began="2026-11-15T10:00:00Z",
    ended=2.5,
    command=("python", "train.py"),
    pid=7,
    hardware=Hardware(2, "some", (GpuInfo(0, "card", 24),), (NodeInfo(0, "dram", 5),), ("vda",)),
    ceilings={"h2d": 25e9},
    planned=Planned(
        tiers={"hbm": PlannedTier(budget=9, at_rest=5, peak=8)},
        phases={"forward": {"hbm": 8}},
        links={"h2d": 100},
        step_seconds=1.5,
        bound_by="h2d",
    ),
    ended_by="exit",
    exit_code=0,
)

RECORDS: list[Sample | Phase | Event] = [
    Sample(0.0),
    Sample(
        t=1.25,
        step=3,
        phase="backward",
        gpu=(GpuSample(allocated=5, h2d=1e9, peak=9), GpuSample(used=7, utilisation=0.5)),
        host=HostSample(rss=9, nodes={"0": 4}),
        disk={"vda": (10, 20)},
        cpu=(0.25, 1.0),
        tiers={"hbm": 3},
    ),
    Phase("forward", 3, 1.0, 1.2),
    Phase("save", None, 2.0, 2.5),
    Event("h2d", "copy", "layers.3", 1.0, 1.1, 3, "forward", "h2d", 64, "host", "gpu", False, "x"),
    Event("gpu", "compute", "layers.3", 1.1, 1.2),
]


def write_example(folder: Path, observation: Observation = OBSERVATION) -> Path:
    run = RunFolder(folder, observation)
    for record in RECORDS:
        run.write(record)
    run.close()
    return folder


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_line_contains_the_whole_record(record: Sample | Phase | Event) -> None:
    assert parse_line(type(record), line_of(record)) == record


def test_a_written_run_is_read_back(tmp_path: Path) -> None:
    run = read_run(write_example(tmp_path / "run"))

    assert run.observation == OBSERVATION
    assert [*run.samples, *run.phases, *run.events] == RECORDS
    assert run.notes == ()


def test_a_truncated_line_is_skipped_and_noted(tmp_path: Path) -> None:
    path = write_example(tmp_path) / "samples.jsonl"
    os.truncate(path, path.stat().st_size - 5)

    run = read_run(tmp_path)

    assert run.samples == (RECORDS[0],)
    assert run.notes == ("samples.jsonl: the last line was cut off",)


@pytest.mark.parametrize("line", ["{", "[1]", "null", '{"t": "x"}', '{"t": NaN}', '{"step": 1}'])
def test_an_invalid_line_is_skipped_and_noted(tmp_path: Path, line: str) -> None:
    path = write_example(tmp_path) / "samples.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")

    run = read_run(tmp_path)

    assert list(run.samples) == RECORDS[:2]
    assert run.notes == ("samples.jsonl: 1 of 3 lines could not be read",)


def test_a_run_without_an_end_has_a_note(tmp_path: Path) -> None:
    RunFolder(tmp_path, Observation(began="2026-11-15T10:00:00Z")).close()

    assert "the recording has no end" in read_run(tmp_path).notes[0]


@pytest.mark.parametrize("version", [0, 2])
def test_a_run_of_another_version_is_rejected(tmp_path: Path, version: int) -> None:
    path = write_example(tmp_path) / "observe.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))

    with pytest.raises(ObserveError, match=rf"observe\.json: version: .*{version}"):
        read_run(tmp_path)


def test_a_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match=r"no observe\.json.*penstock profile"):
        read_run(tmp_path / "nowhere")


def test_a_file_in_place_of_the_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("user data")

    with pytest.raises(ObserveError, match="cannot be written to"):
        RunFolder(tmp_path / "run", OBSERVATION)
    assert (tmp_path / "run").read_text() == "user data"


def test_a_new_run_replaces_an_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_example(tmp_path)
    (tmp_path / "events.4.jsonl").write_text("")
    (tmp_path / "train.py").write_text("user data")

    RunFolder(tmp_path, OBSERVATION).close()

    assert sorted(p.name for p in tmp_path.iterdir()) == ["observe.json", "train.py"]


def test_parts_stay_within_the_limit_and_include_the_first_and_newest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, OBSERVATION, limit=64 * 1024)
    for i in range(10_000):
        folder.write(Phase("forward", i, float(i), float(i + 1)))
    folder.close()

    run = read_run(tmp_path)
    steps = [phase.step for phase in run.phases]

    assert sum(path.stat().st_size for path in tmp_path.glob("phases*")) <= 8 * 1024 + 1024
    assert steps[:3] == [0, 1, 2]
    assert steps[-1] == 9_999
    assert 20 < len(steps) < 1000
    assert "were deleted" in run.notes[0]


def test_parts_are_read_in_order(tmp_path: Path) -> None:
    file = LineFile(tmp_path, "phases", limit=12 * 60, parts=12)
    for i in range(11):  # more than ten parts: "10" must come after "9"
        file.write(line_of(Phase("a", i, 0.0, 0.0)) * 3)
    file.close()
    RunFolder(tmp_path / "other", OBSERVATION).close()
    os.replace(tmp_path / "other/observe.json", tmp_path / "observe.json")

    assert [phase.step for phase in read_run(tmp_path).phases][::3] == list(range(11))


def test_a_step_that_was_written_twice_is_read_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, OBSERVATION)
    events = [Event("gpu", "compute", "a", float(i), i + 1.0, step=i) for i in range(3)]
    run.write(events[2])
    run.write_slowest(line_of(events[0]) + line_of(events[2]))
    run.close()

    assert read_run(tmp_path).events == (events[0], events[2])


def test_processes_are_read_together_with_their_run(tmp_path: Path) -> None:
    outside = RunFolder(tmp_path, Observation(began="2026-11-15T10:00:00Z", ended=9.0))
    outside.write(Sample(1.1, cpu=(0.5,)))
    outside.write(Sample(5.0, cpu=(0.5,)))
    outside.close()
    RunFolder(tmp_path / "process-5", OBSERVATION).close()
    for rank in (10, 2):
        write_example(tmp_path / f"rank-{rank}")

    run = read_run(tmp_path)

    assert list(run.ranks) == ["rank-2", "rank-10", "process-5"]
    assert run.observation.planned == OBSERVATION.planned
    assert run.observation.ended == 9.0
    assert [(s.t, s.phase, s.step) for s in run.samples] == [
        (0.0, None, None), (1.1, "forward", 3), (1.25, "backward", 3), (5.0, None, None),
    ]  # fmt: skip
    assert len(run.phases) == 2


@pytest.mark.parametrize("own", [None, 5 * MiB])
def test_the_process_own_memory_figure_takes_precedence(tmp_path: Path, own: int | None) -> None:
    """From outside, memory that forked children share is counted once per child."""
    outside = RunFolder(tmp_path, OBSERVATION)
    outside.write(Sample(1.0, host=HostSample(rss=99 * MiB, available=GiB)))
    outside.close()
    inside = RunFolder(tmp_path / "process-5", OBSERVATION)
    inside.write(Sample(2.0, host=HostSample(rss=own)))
    inside.close()

    found = [sample.host for sample in read_run(tmp_path).samples]

    assert [host.rss for host in found] == ([None, own] if own else [99 * MiB, None])
    assert found[0].available == GiB
