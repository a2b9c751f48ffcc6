"""`penstock train --profile N` records the first steps of a run."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.observe.run_files import read_run
from tests.train.runs import RESIDENT, Runs, contents


def test_recording_the_first_steps_does_not_change_the_result(runs: Runs, tmp_path: Path) -> None:
    plain = runs.run(tmp_path / "plain", *RESIDENT, "--steps", "4")
    profiled = runs.run(tmp_path / "out", *RESIDENT, "--steps", "4", "--profile", "2")

    assert profiled.code == 0
    assert profiled.losses == plain.losses
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")
    run = read_run(tmp_path / "out/profile")
    assert {phase.step for phase in run.phases if phase.name == "backward"} == {1, 2}
    assert {event.step for event in run.events} == {1, 2}
    assert run.observation.planned is not None
    assert "out/profile" in profiled.errors
    assert json.loads((tmp_path / "out/profile/trace.json").read_text())["traceEvents"]


def test_a_run_shorter_than_the_recording_is_recorded_to_its_end(
    runs: Runs, tmp_path: Path
) -> None:
    ended = runs.run(tmp_path / "out", *RESIDENT, "--steps", "1", "--profile", "9")

    assert ended.code == 0
    observation = read_run(tmp_path / "out/profile").observation
    assert observation.ended_by == "the end of the run"
