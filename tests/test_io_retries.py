"""Operations that fail for a moment are repeated, and counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock import io_retries
from penstock.durable_files import copy_file, link_file, name_file, replace_file, sync
from tests.support.failing_files import FailingFiles, fail_from, fail_once


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(io_retries, "sleep", made.append)
    io_retries.take_counts()
    return made


def failing(times: int, code: int) -> tuple[list[int], object]:
    calls: list[int] = []

    def operation() -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return "done"

    return calls, operation


@pytest.mark.parametrize("code", sorted(io_retries.TRANSIENT))
def test_an_error_that_passes_is_counted_and_not_raised(code: int, pauses: list[float]) -> None:
    calls, operation = failing(3, code)
    assert io_retries.repeat(operation, "disk") == "done"  # type: ignore[arg-type, comparison-overlap]
    assert len(calls) == 4
    assert pauses == list(io_retries.PAUSES[:3])
    assert io_retries.take_counts() == {"disk": 3}
    assert io_retries.take_counts() == {}


def test_an_error_that_stays_is_raised_after_two_seconds(pauses: list[float]) -> None:
    calls, operation = failing(100, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        io_retries.repeat(operation, "disk")  # type: ignore[arg-type]
    assert len(calls) == 6
    assert sum(pauses) == pytest.approx(2.0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_not_tried_again(code: int, pauses: list[float]) -> None:
    calls, operation = failing(1, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        io_retries.repeat(operation, "disk")  # type: ignore[arg-type]
    assert len(calls) == 1
    assert pauses == []


@pytest.mark.parametrize("write", ["replace", "copy", "link"])
def test_every_call_of_a_small_file_may_fail_once(tmp_path: Path, write: str) -> None:
    source = tmp_path / "source"
    source.write_text("new")

    def put(target: Path) -> None:
        if write == "replace":
            replace_file(target, "new")
        else:
            (copy_file if write == "copy" else link_file)(source, target)

    with FailingFiles([tmp_path]).installed() as healthy:
        put(tmp_path / "first")
    for number in range(1, len(healthy.calls) + 1):
        target = tmp_path / f"target-{number}"
        target.write_text("old")
        files = FailingFiles([tmp_path], fail_once(number, errno.EIO))
        with files.installed():
            put(target)
        assert files.failed
        assert target.read_text() == "new"
    assert not list(tmp_path.glob(".*"))


def test_a_file_is_written_again_after_a_failed_fsync(tmp_path: Path) -> None:
    """After a failed fsync the pages may be gone: a second fsync alone would prove nothing."""
    with FailingFiles([tmp_path]).installed() as healthy:
        replace_file(tmp_path / "a", "text")
    names = [call for call, _ in healthy.calls]
    files = FailingFiles([tmp_path], fail_once(names.index("fsync") + 1, errno.EIO))
    with files.installed():
        replace_file(tmp_path / "b", "text")
    names = [call for call, _ in files.calls]
    assert names.count("open") == names.count("write") == 2
    assert (tmp_path / "b").read_text() == "text"


def test_a_failed_fsync_or_write_names_the_file(tmp_path: Path) -> None:
    for number in (2, 3):  # write and fsync know only a descriptor
        path = tmp_path / str(number)
        files = FailingFiles([tmp_path], fail_from(number, errno.EROFS))
        with files.installed(), pytest.raises(OSError, match="Read-only") as failed:
            replace_file(path, "text")
        assert failed.value.filename == str(path)
    files = FailingFiles([tmp_path], fail_from(1, errno.EROFS))
    with files.installed(), pytest.raises(OSError, match="Read-only") as failed:
        sync(tmp_path)
    assert failed.value.filename == str(tmp_path)


def test_an_error_with_a_name_or_a_message_of_its_own_is_unchanged() -> None:
    with pytest.raises(OSError, match="Is a directory") as failed, name_file("other"):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", "own")
    assert failed.value.filename == "own"
    with pytest.raises(OSError, match="a message") as failed, name_file("other"):
        raise OSError("a message")
    assert failed.value.filename is None
