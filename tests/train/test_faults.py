"""After signals, kills and full disks, at most the work since the last checkpoint is lost."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint import model_files
from penstock.checkpoint.run_directory import list_checkpoints
from penstock.checkpoint.training_state import TrainingState
from tests.train.conftest import STEPS
from tests.train.runs import RESIDENT, RunResult, Runs, contents, wait_for_exit, wait_for_line

Whole = tuple[Path, RunResult]


def test_a_signal_stops_the_run_after_the_step_and_saves(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = runs.start(out, *RESIDENT, "--steps", "100000")
    wait_for_line(child, '"step": 2')
    child.send_signal(signal.SIGTERM)
    result = wait_for_exit(child)

    assert result.code == 143, result.errors
    assert result.events[-1]["event"] == "stopped"
    last = result.events[-1]["step"]
    assert list_checkpoints(out).whole[0].step == last >= 2
    assert "Traceback" not in result.errors


@pytest.mark.long  # test_signals.py has the handler
def test_a_second_signal_stops_the_run_immediately(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = runs.start(out, *RESIDENT, "--steps", "100000", "--save-every", "2")
    wait_for_line(slow, '"event": "save"')
    # Two different signals, sent while the process is stopped: the kernel merges equal ones.
    slow.send_signal(signal.SIGSTOP)
    slow.send_signal(signal.SIGINT)
    slow.send_signal(signal.SIGTERM)
    slow.send_signal(signal.SIGCONT)
    result = wait_for_exit(slow)

    assert result.code in (130, 143), result.errors
    assert "stopped immediately" in result.errors
    assert list_checkpoints(out).whole
    assert not list_checkpoints(out).damaged


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(
    kills: int, runs: Runs, whole: Whole, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    draw = random.Random(20)
    for number in range(kills):
        budget = runs.tight() if number % 2 else RESIDENT
        child = runs.start(out, *budget, "--steps", str(STEPS), "--save-every", "1", "--resume")
        wait_for_line(child, '"event": "plan"')
        time.sleep(draw.uniform(0.0, 1.5))  # while loading, stepping or saving: any moment will do
        child.kill()
        child.communicate()
    result = runs.run(out, *runs.tight(), "--steps", str(STEPS), "--resume")

    assert result.code == 0, result.errors
    assert contents(out) == contents(whole[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes, which `fill` can fill completely."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("mounting a small file system needs root")
    at = tmp_path / "small"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(at)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mount is not permitted here")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path) -> Path:
    """Fill the file system completely, and return the file that fills it."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return path


def test_training_continues_when_the_disk_is_full(
    runs: Runs, whole: Whole, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine.engine import Engine

    out = small_disk / "out"
    plain = Engine.step
    fillers = []

    def step(self: Engine, batch: Any) -> Any:
        if self.batches == 2:
            fillers.append(fill(small_disk))
        if self.batches == 4:
            fillers.pop().unlink()
        return plain(self, batch)

    monkeypatch.setattr(Engine, "step", step)
    result = runs.run(out, *RESIDENT, "--steps", str(STEPS), "--save-every", "1", "--keep", "1")

    assert result.code == 0, result.errors
    assert result.errors.count("checkpoint not saved") == 2
    assert "the disk is full" in result.errors
    assert [event["step"] for event in result.of("save")] == [1, 2, 5, 6]
    assert contents(out) == contents(whole[0])
    assert not list(out.glob(".*tmp*"))


def test_any_file_of_a_save_may_fail(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_in(step: int, write: Callable[..., Any], folder_of: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if f"checkpoint-{step:06d}" in str(folder_of(*args)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args, **kwargs)

        return call

    write, save = model_files.replace_file, TrainingState.save
    monkeypatch.setattr(model_files, "replace_file", fail_in(2, write, lambda path, data: path))
    monkeypatch.setattr(TrainingState, "save", fail_in(3, save, lambda state, folder: folder))
    out = tmp_path / "out"
    result = runs.run(out, *RESIDENT, "--steps", "4", "--save-every", "1", "--keep", "4")

    assert result.code == 0, result.errors
    assert result.errors.count(f"checkpoint not saved: {out}/") == 2
    assert result.errors.count("the disk is full") == 2
    assert [event["step"] for event in result.of("save")] == [1, 4]
    assert [checkpoint.step for checkpoint in list_checkpoints(out).whole] == [4, 1]
    assert not list_checkpoints(out).damaged


def test_space_for_checkpoints_is_checked_before_the_first_step(
    runs: Runs, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3 << 20))

    result = runs.run(small_disk / "out", *RESIDENT, "--steps", "2")

    assert result.code == 1
    assert "checkpoints need" in result.errors
    assert result.losses == {}
    assert not (small_disk / "out").exists()
