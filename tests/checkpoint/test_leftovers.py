"""Drafts of killed runs are removed; drafts of live runs are not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.checkpoint import run_directory
from penstock.checkpoint.errors import CheckpointWarning
from penstock.checkpoint.run_directory import latest_checkpoint, new_checkpoint, remove_leftovers
from tests.checkpoint.saves import save

GONE = 2**22 + 1
"""Larger than any pid."""


def leftover(out: Path, pid: int) -> Path:
    path = out / f".checkpoint-000009.tmp-{pid}-0123abcd"
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "half").write_text("x")
    return path


def test_only_drafts_of_dead_runs_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = leftover(tmp_path, GONE)
    others = [tmp_path / ".checkpoint-000009.tmp-x", tmp_path / ".hidden", tmp_path / "tmp-1-2"]
    for path in others:
        path.mkdir()
    (tmp_path / ".checkpoint-000009.tmp-1-0123abce").symlink_to(others[1])

    assert remove_leftovers(tmp_path) == (left,)
    assert len(os.listdir(tmp_path)) == 5
    assert remove_leftovers(tmp_path) == ()


def test_a_draft_of_this_process_is_not_removed(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, 1) as folder:
        assert remove_leftovers(tmp_path) == ()
        assert folder.is_dir()


def test_a_draft_of_another_process_is_removed_only_after_its_death(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom penstock.checkpoint.run_directory import new_checkpoint\n"
        "with new_checkpoint(sys.argv[1], 1) as folder:\n"
        "    print(folder, flush=True)\n    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        draft = Path(process.stdout.readline().strip())
        assert remove_leftovers(tmp_path) == ()
        process.kill()
    assert draft.is_dir()

    assert remove_leftovers(tmp_path) == (draft,)


def test_a_draft_with_this_pid_of_an_earlier_process_is_removed(tmp_path: Path) -> None:
    """In a container every run may have the same pid."""
    left = leftover(tmp_path, os.getpid())

    assert remove_leftovers(tmp_path) == (left,)


def test_without_locks_the_pid_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    live = leftover(tmp_path, os.getppid())
    left = [leftover(tmp_path, GONE), leftover(tmp_path, 9_999_999_999)]

    with new_checkpoint(tmp_path, 1) as folder:
        assert remove_leftovers(tmp_path) == tuple(sorted(left))
        assert folder.is_dir()
    assert live.is_dir()


def test_a_draft_removed_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = run_directory.try_lock, []

    def remove_and_lock(fd: int) -> bool | None:
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.rmdir(removed[0])
        return lock(fd)

    monkeypatch.setattr(run_directory, "try_lock", remove_and_lock)
    save(tmp_path, 1)

    assert removed
    assert latest_checkpoint(tmp_path).step == 1  # type: ignore[union-attr]


def test_a_leftover_that_cannot_be_removed_causes_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover(tmp_path, GONE)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", denied)
    with pytest.warns(CheckpointWarning, match=r"tmp-.*could not be removed: Permission denied"):
        assert remove_leftovers(tmp_path) == ()
