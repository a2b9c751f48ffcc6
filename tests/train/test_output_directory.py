"""Nothing is lost when --out is moved or removed during a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.checkpoint.run_directory import latest_checkpoint, list_checkpoints
from penstock.checkpoint.training_state import TrainingState
from penstock.engine.engine import Engine
from penstock.train.checkpoints import CheckpointSaver
from penstock.train.errors import OutLostError, OutNotADirectoryError
from penstock.train.output_directory import OutputDirectory
from tests.train.conftest import STEPS
from tests.train.runs import RESIDENT, RunResult, Runs, contents, run_command

Whole = tuple[Path, RunResult]
Action = Callable[[], object]


def before_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Action) -> None:
    plain = Engine.step

    def step(self: Engine, batch: Any) -> Any:
        if self.batches == number - 1:
            action()
        return plain(self, batch)

    monkeypatch.setattr(Engine, "step", step)


def during_save(monkeypatch: pytest.MonkeyPatch, number: int, action: Action) -> None:
    plain, calls = TrainingState.save, []

    def save(self: TrainingState, folder: Path) -> None:
        plain(self, folder)
        # The engine saves a state, too: act after the second one of a checkpoint.
        calls.append(folder)
        if len(calls) == 2 * number:
            action()

    monkeypatch.setattr(TrainingState, "save", save)


def train(runs: Runs, out: Path, *more: str) -> RunResult:
    return runs.run(out, *RESIDENT, "--steps", str(STEPS), "--save-every", "2", *more)


def assert_whole(out: Path, whole: Whole) -> None:
    """The run is there as if nothing had happened: it loads, resumes and has equal bits."""
    reference = whole[0]
    assert contents(out) == contents(reference)
    newest = latest_checkpoint(out)
    known = latest_checkpoint(reference)
    assert newest is not None
    assert known is not None
    assert set(newest.files) == set(known.files)
    assert not list_checkpoints(out).damaged
    files = {path.name for path in reference.iterdir() if path.is_file()}
    assert files <= set(os.listdir(out))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"event": "step"' in line]
    assert steps == list(range(1, STEPS + 1))
    resumed = run_command(["train", "--resume", "--json", "--out", str(out)])
    assert resumed.code == 0, resumed.errors


@pytest.mark.parametrize("moment", ["before a step", "during a save"])
def test_a_removed_directory_is_created_again_with_everything_a_resume_needs(
    moment: str, runs: Runs, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    act = before_step if moment == "before a step" else during_save
    act(monkeypatch, 2, lambda: shutil.rmtree(out))
    result = train(runs, out)

    assert result.code == 0, result.errors
    assert result.errors.count(f"warning: {out} was removed during the run") == 1
    assert [event["step"] for event in result.of("save")] == [2, 4, 6]
    assert_whole(out, whole)


@pytest.mark.parametrize(
    ("moment", "successor"),
    [
        ("before a step", False),
        ("during a save", True),
        pytest.param("before a step", True, marks=pytest.mark.long),
        pytest.param("during a save", False, marks=pytest.mark.long),
    ],
)
def test_a_moved_directory_is_followed(
    moment: str,
    successor: bool,
    runs: Runs,
    whole: Whole,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"

    def move() -> None:
        out.rename(moved)
        if successor:
            out.mkdir()

    act = before_step if moment == "before a step" else during_save
    act(monkeypatch, 2, move)
    result = train(runs, out)

    assert result.code == 0, result.errors
    assert result.errors.count(f"warning: {out} was moved to {moved} during the run") == 1
    assert result.events[-1]["out"] == result.events[-1]["model"] == str(moved)
    assert os.listdir(out) == [] if successor else not out.exists()
    assert f"out: {moved}\n" in (moved / "run.yaml").read_text()
    assert_whole(moved, whole)


def test_a_directory_removed_after_the_last_save_is_saved_again(
    runs: Runs, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, evaluate, calls = tmp_path / "out", Engine.evaluate, []

    def remove(self: Engine, batches: Any) -> Any:
        calls.append(0)
        if len(calls) == 2:
            shutil.rmtree(out)
        return evaluate(self, batches)

    monkeypatch.setattr(Engine, "evaluate", remove)
    result = train(runs, out)
    assert result.code == 0, result.errors
    assert_whole(out, whole)


def test_files_removed_from_the_directory_are_in_the_next_checkpoint(
    runs: Runs, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def remove() -> None:
        for name in ("config.json", "tokenizer.json", "run.yaml", "metrics.jsonl"):
            (out / name).unlink()
        shutil.rmtree(out / "checkpoint-000004")

    before_step(monkeypatch, 5, remove)
    assert train(runs, out).code == 0
    newest, known = latest_checkpoint(out), latest_checkpoint(whole[0])
    assert newest is not None
    assert known is not None
    assert set(newest.files) == set(known.files)
    assert contents(out) == contents(whole[0])
    assert (out / "metrics.jsonl").read_text().count('"event": "step"') == STEPS


@pytest.mark.filterwarnings("ignore:.*recording stopped:RuntimeWarning")
def test_a_profile_that_is_lost_with_the_directory_does_not_end_the_run(
    runs: Runs, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def remove() -> None:
        while out.exists():  # the recorder may write a file into a folder that is being removed
            shutil.rmtree(out, ignore_errors=True)

    before_step(monkeypatch, 2, remove)
    result = train(runs, out, "--profile", "3")
    assert result.code == 0, result.errors
    assert f"warning: no profile: {out / 'profile'}" in result.errors
    assert contents(out) == contents(whole[0])


def test_a_foreign_directory_with_the_same_name_is_not_written_to(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def replace() -> None:
        shutil.rmtree(out)
        out.mkdir()
        (out / "own").write_text("")

    before_step(monkeypatch, 3, replace)
    result = train(runs, out)
    assert result.code == 1
    assert result.errors.count(f"{out} was removed during the run, and something else has") == 2
    assert "Traceback" not in result.errors
    assert os.listdir(out) == ["own"]


def test_a_file_that_disappears_during_a_save_leaves_no_complete_checkpoint(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def remove() -> None:
        (next(out.glob(".checkpoint-000002.tmp-*")) / "config.json").unlink()

    during_save(monkeypatch, 1, remove)
    result = train(runs, out)
    assert result.code == 0, result.errors
    assert "config.json disappeared during the save" in result.errors
    assert [checkpoint.step for checkpoint in list_checkpoints(out).whole] == [6, 4]


@pytest.mark.parametrize("resume", [False, True])
def test_something_else_under_the_name_is_named(resume: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    expected = {
        "file": r"file is not a directory; remove it, or choose another --out",
        "file/deeper": r"file is not a directory, which is in the path .*file/deeper;",
        "link": r"link is a link to nothing;",
    }

    for name, words in expected.items():
        with pytest.raises(OutNotADirectoryError, match=words):
            OutputDirectory(tmp_path / name, resume=resume)


def test_a_directory_that_cannot_be_created_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = OutputDirectory(tmp_path / "a" / "out", resume=False)
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("")
    with pytest.raises(OutLostError, match=r"a/out was removed .* Not a directory"):
        directory.find()
    (tmp_path / "a").unlink()
    assert "created again" in directory.find()
    assert directory.find() == ""
    directory.close()
    assert not (tmp_path / "a" / "out").exists()


def test_files_that_could_not_be_restored_are_restored_by_the_next_save(tmp_path: Path) -> None:
    directory = OutputDirectory(tmp_path / "out", resume=False)
    problems = [OSError(28, "No space left on device", str(tmp_path / "out/run.yaml"))]

    def restore(path: Path) -> None:
        if problems:
            raise problems.pop()
        (path / "run.yaml").write_text("")

    directory.on_change.append(restore)
    (tmp_path / "out").rmdir()
    with pytest.raises(OutLostError, match=r"run.yaml cannot be written: No space left"):
        directory.find()
    assert directory.find() == ""
    assert (tmp_path / "out/run.yaml").exists()
    directory.close()


@pytest.mark.parametrize("moment", ["before the save", "during the save"])
def test_a_save_writes_to_the_directory_that_was_moved(moment: str, tmp_path: Path) -> None:
    """And not to another one, which has got its name."""
    out, moved = tmp_path / "out", tmp_path / "moved"
    directory = OutputDirectory(out, resume=False)

    def move() -> None:
        out.rename(moved)
        out.mkdir()

    def write(position: Any, report: Any) -> None:
        if not moved.exists():
            move()
            raise FileNotFoundError(2, "No such file or directory", str(saver.out))
        (saver.out / "checkpoint").touch()

    saver: Any = SimpleNamespace(
        out=out, before_save=[], find_directory=lambda: bool(directory.find()), _write=write
    )
    directory.on_change.append(lambda path: setattr(saver, "out", path))
    if moment == "before the save":
        move()

    saved = CheckpointSaver.save(saver, SimpleNamespace(step=3))  # type: ignore[arg-type]

    assert (saved, saver.saved_step) == (moved / "checkpoint-000003", 3)
    assert (moved / "checkpoint").exists()
    assert os.listdir(out) == []
    directory.close()
