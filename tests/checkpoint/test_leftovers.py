"""What killed runs leave is swept away; what living ones are writing is not."""

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
"""No pid: beyond the kernel's largest."""


def leftover(out: Path, pid: int) -> Path:
    path = out / f".checkpoint-000009.tmp-{pid}-0123abcd"
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "half").write_text("x")
    return path


def test_what_a_dead_run_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = leftover(tmp_path, GONE)
    others = [tmp_path / ".checkpoint-000009.tmp-x", tmp_path / ".hidden", tmp_path / "tmp-1-2"]
    for path in others:
        path.mkdir()
    (tmp_path / ".checkpoint-000009.tmp-1-0123abce").symlink_to(others[1])

    assert remove_leftovers(tmp_path) == (left,)
    assert len(os.listdir(tmp_path)) == 5
    assert remove_leftovers(tmp_path) == ()


def test_a_draft_of_this_very_process_is_not_swept(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, 1) as folder:
        assert remove_leftovers(tmp_path) == ()
        assert folder.is_dir()


def test_a_draft_of_a_living_process_is_not_swept_until_it_is_killed(tmp_path: Path) -> None:
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


def test_the_same_pid_after_a_restart_is_another_process(tmp_path: Path) -> None:
    """In a container every run has the same pid."""
    left = leftover(tmp_path, os.getpid())

    assert remove_leftovers(tmp_path) == (left,)


def test_without_locks_the_pid_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", none)
    living = leftover(tmp_path, os.getppid())
    left = [leftover(tmp_path, GONE), leftover(tmp_path, 9_999_999_999)]

    with new_checkpoint(tmp_path, 1) as folder:
        assert remove_leftovers(tmp_path) == tuple(sorted(left))
        assert folder.is_dir()
    assert living.is_dir()


def test_a_draft_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = run_directory._try_lock, []

    def late(fd: int) -> bool | None:
        if not swept:
            swept.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.rmdir(swept[0])
        return lock(fd)

    monkeypatch.setattr(run_directory, "_try_lock", late)
    save(tmp_path, 1)

    assert swept
    assert latest_checkpoint(tmp_path).step == 1  # type: ignore[union-attr]


def test_a_leftover_that_cannot_be_removed_is_told_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover(tmp_path, GONE)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", denied)
    with pytest.warns(CheckpointWarning, match=r"tmp-.*could not be removed: Permission denied"):
        assert remove_leftovers(tmp_path) == ()
