"""Failures of the recording: the observed program continues."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.observe import recorder as recording
from penstock.observe.errors import ObserveError
from penstock.observe.run_files import read_run
from tests.observe.training_loops import Loop, expected, phases_and_steps


def test_a_full_disk_stops_the_recording_but_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "FLUSH", 0.0)
    loop = Loop()

    def program() -> None:
        with penstock.observe(tmp_path, interval=0.005) as obs:
            loop.step()
            monkeypatch.setattr("penstock.observe.run_files.LineFile.flush", full)
            obs._running()._thread.join()  # it has stopped because of the error
            loop.step()

    with pytest.warns(RuntimeWarning, match=r"No space left on device.*continues") as warned:
        program()

    assert len(warned) == 1
    assert read_run(tmp_path).observation.ended is None


def test_an_error_in_the_tracker_becomes_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the clock has stopped")

    loop = Loop()
    with penstock.observe(tmp_path):
        loop.step()
        monkeypatch.setattr("penstock.observe.phase_tracker.PhaseTracker._begin", broken)
        loop.step()

    run = read_run(tmp_path)
    assert phases_and_steps(run) == expected(1)
    assert run.notes == ("phases are no longer tracked: the clock has stopped",)


def test_an_unwritable_directory_is_rejected_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")

    with (
        pytest.raises(ObserveError, match="cannot be written to"),
        penstock.observe(tmp_path / "run"),
    ):
        pytest.fail("the program ran")


@pytest.mark.parametrize(
    ("options", "field"),
    [({"interval": 0.0}, "interval"), ({"interval": float("nan")}, "interval"),
     ({"exact": (0,)}, "exact")],
)  # fmt: skip
def test_invalid_options_are_rejected(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ObserveError, match=field):
        penstock.observe(tmp_path, **options)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    loop = Loop()
    with penstock.observe(tmp_path) as obs:
        loop.step()
        child = os.fork()
        if child == 0:
            try:
                loop.step()
                obs.stop()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        loop.step()

    run = read_run(tmp_path)
    assert phases_and_steps(run) == expected(2)
    assert run.observation.ended is not None
