"""Files are replaced whole, whatever happens meanwhile, and dead processes leave nothing behind."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from penstock import records
from penstock.durable_files import (
    PRIVATE,
    copy_file,
    link_file,
    remove_abandoned_drafts,
    replace_file,
    replacement_of,
)
from penstock.settings import Settings, write_yaml

LEFT = ".plan.json.0123abcd.tmp"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record the calls that change the disk or make a change durable, with their paths."""
    log: list[tuple[str, str]] = []
    for name in ("open", "fsync", "replace", "link", "unlink"):
        real = getattr(os, name)

        def call(*args, _name=name, _real=real, **more):  # type: ignore[no-untyped-def]
            at = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else args[0]
            if _name != "open" or args[1] & os.O_CREAT:
                log.append((_name, Path(at).name))
            return _real(*args, **more)

        monkeypatch.setattr(os, name, call)
    return log


def write_with_records(path: Path) -> None:
    records.save({"a": 1}, path)


def write_settings(path: Path) -> None:
    write_yaml(Settings(), path)


def write_copy(path: Path) -> None:
    source = path.with_name("source")
    source.write_text("text")
    copy_file(source, path)


@pytest.mark.parametrize("write", [write_with_records, write_settings, write_copy])
def test_a_file_is_synced_before_its_rename_and_the_directory_after_it(
    tmp_path: Path, calls: list[tuple[str, str]], write: object
) -> None:
    """This order decides what a power cut can destroy."""
    write(tmp_path / "file")  # type: ignore[operator]

    created = [name for call, name in calls if call == "open"]
    assert [call for call, _ in calls] == ["open", "fsync", "replace", "fsync"]
    assert [name for _, name in calls] == [*(created * 3), tmp_path.name]
    assert created[0].startswith(".file.")


def test_the_content_is_on_disk_when_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            sizes.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "file", "12345")
    assert sizes == [5]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    replace_file(tmp_path / "file", "old")

    def fail(*_: object) -> None:
        raise OSError("failed")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="failed"):
        replace_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_planted_links_are_neither_followed_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    planted = [".run.yaml.tmp", ".run.yaml.00000000.tmp"]
    for name in planted:
        (tmp_path / name).symlink_to(precious)
    names = iter(["00000000", "11111111"])  # an attacker who guesses the random name
    monkeypatch.setattr("penstock.durable_files.secrets.token_hex", lambda _: next(names))

    write_yaml(Settings(), tmp_path / "run.yaml")

    assert remove_abandoned_drafts(tmp_path) == ()
    assert precious.read_text() == "precious"
    assert all((tmp_path / name).is_symlink() for name in planted)
    assert not (tmp_path / "run.yaml").is_symlink()


def test_private_files_are_private_from_their_creation(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with replacement_of(tmp_path / "file", mode=PRIVATE):
            (draft,) = tmp_path.iterdir()
            assert stat.S_IMODE(draft.stat().st_mode) == 0o600
        replace_file(tmp_path / "shared", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o666


def test_linking_a_file_again_leaves_no_second_link(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("weights")
    for _ in range(3):
        link_file(source, target)
    assert source.stat().st_nlink == 2
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_a_file_is_copied_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "source").write_text("weights")
    link_file(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "weights"
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_leftovers_of_dead_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    left = [".metrics.jsonl.tmp", LEFT, ".run.yaml.tmp"]
    others = ["plan.json", ".plan.json.tmp", ".plan.json.0123abc.tmp", "x.0123abcd.tmp"]
    for name in (*left, *others):
        (tmp_path / name).write_text("")
    (tmp_path / ".directory.0123abcd.tmp").mkdir()

    with replacement_of(tmp_path / "live") as file:
        assert remove_abandoned_drafts(tmp_path) == tuple(tmp_path / name for name in left)
        file.write(b"text")

    kept = sorted([*others, ".directory.0123abcd.tmp", "live"])
    assert sorted(os.listdir(tmp_path)) == kept
    assert remove_abandoned_drafts(tmp_path / "nowhere") == ()


def test_a_write_removes_leftovers_of_the_same_file_unless_they_are_in_use(tmp_path: Path) -> None:
    live = tmp_path / ".plan.json.89abcdef.tmp"
    for name in (LEFT, live.name, ".other.json.0123abcd.tmp"):
        (tmp_path / name).write_text("")
    with live.open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        replace_file(tmp_path / "plan.json", "{}")
        expected = [".other.json.0123abcd.tmp", live.name, "plan.json"]
        assert sorted(os.listdir(tmp_path)) == expected


def test_nothing_is_removed_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / LEFT).write_text("")
    monkeypatch.setattr(fcntl, "flock", unsupported)
    replace_file(tmp_path / "plan.json", "{}")
    assert remove_abandoned_drafts(tmp_path) == ()
    assert sorted(os.listdir(tmp_path)) == [LEFT, "plan.json"]


def test_a_draft_that_was_taken_for_a_leftover_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = fcntl.flock, []

    def remove_first(fd: int, how: int) -> None:
        if not removed:
            removed.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(removed[0])
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    replace_file(tmp_path / "file", "text")
    assert removed
    assert (tmp_path / "file").read_text() == "text"
