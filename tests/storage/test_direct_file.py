"""Direct files: whole blocks, fallbacks to buffered I/O, and the overlapped writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.storage import direct_file
from penstock.storage.direct_file import (
    BLOCK,
    BUFFER_NBYTES,
    DirectFile,
    DirectWriter,
    is_direct_io_refused,
    set_direct,
)
from tests.support.disks import direct_directory

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@contextlib.contextmanager
def opened(path: Path, flags: int = NEW) -> Iterator[DirectFile]:
    file = DirectFile.open(path, flags)
    try:
        yield file
    finally:
        file.close()


def uses_direct_io(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_blocks_are_padded_with_zeros_and_read_back(tmp_path: Path) -> None:
    with opened(direct_directory(tmp_path) / "file") as file:
        assert file.direct
        assert uses_direct_io(file.fd)
        file.write_blocks(BLOCK, b"abc")

        assert file.read_blocks(BLOCK, 5) == b"abc\0\0"
        assert file.read_blocks(BLOCK, 3 * BLOCK) == b"abc".ljust(BLOCK, b"\0")
    assert (tmp_path / "file").stat().st_size == 2 * BLOCK


def test_a_refused_open_falls_back_to_buffered_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse_after_creating(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", refuse_after_creating)
    with opened(tmp_path / "file") as file:
        assert not file.direct
        file.write_blocks(0, b"abc")
        assert file.read_blocks(0, 3) == b"abc"


def test_an_existing_file_is_not_opened_as_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("existing")

    with pytest.raises(FileExistsError), opened(tmp_path / "file"):
        pass


def test_a_refused_first_write_falls_back_to_buffered_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def refuse_direct(fd: int, buffers: list[memoryview], offset: int) -> int:
        if uses_direct_io(fd):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse_direct)
    with opened(direct_directory(tmp_path) / "file") as file:
        assert file.direct
        file.write_blocks(0, b"abc")

        assert not file.direct
        assert file.read_blocks(0, 3) == b"abc"


def test_other_write_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    with opened(direct_directory(tmp_path) / "file") as file:
        with pytest.raises(OSError, match="Input/output error") as caught:
            file.write_blocks(0, b"abc")
        assert file.direct
    assert not is_direct_io_refused(caught.value)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    with opened(tmp_path / "file") as file:
        file.close()
    assert file.fd == -1


@pytest.mark.parametrize("size", [0, 1, BLOCK, BUFFER_NBYTES, 3 * BUFFER_NBYTES + BLOCK + 7])
def test_the_writer_writes_every_byte_and_nothing_else(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    fd = os.open(tmp_path / "file", NEW)
    try:
        with contextlib.closing(DirectWriter(fd, "file")) as writer:
            for start in range(0, size, 1_000_003):
                writer.write(memoryview(data)[start : start + 1_000_003])
            writer.sync()
    finally:
        os.close(fd)

    assert (tmp_path / "file").read_bytes() == data


def test_the_writer_waits_for_stable_storage_after_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    fd = os.open(tmp_path / "file", NEW)
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    try:
        with contextlib.closing(DirectWriter(fd, "file")) as writer:
            writer.write(memoryview(bytes(BLOCK + 7)))
            writer.sync()
    finally:
        os.close(fd)

    assert sizes == [BLOCK + 7]


def test_a_file_system_that_cannot_turn_direct_io_on_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(direct_directory(tmp_path) / "file") as file:
        assert set_direct(file.fd, on=False) is False
        assert set_direct(file.fd, on=True) is True

        def refuse(fd: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETFL:
                raise OSError(errno.EINVAL, "no direct I/O")
            return 0

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        assert set_direct(file.fd, on=True) is False


def test_a_file_system_without_preallocation_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        asked.append((offset, nbytes))
        raise OSError(errno.EOPNOTSUPP, "no preallocation")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    data = os.urandom(3 * BUFFER_NBYTES + 5)
    assert _written(direct_directory(tmp_path) / "file", data) == data
    assert asked == [(0, direct_file.RESERVE_NBYTES)]


def test_space_is_preallocated_ahead_and_cut_off_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(direct_file, "RESERVE_NBYTES", 2 * BUFFER_NBYTES)
    monkeypatch.setattr(
        os, "posix_fallocate", lambda fd, at, n: (asked.append((at, n)), fallocate(fd, at, n))[1]
    )
    data = os.urandom(5 * BUFFER_NBYTES + 9)
    assert _written(direct_directory(tmp_path) / "file", data) == data
    size = 2 * BUFFER_NBYTES
    assert asked == [(0, size), (size, size), (2 * size, size)]


@pytest.mark.parametrize("most", [BLOCK, BLOCK + 1, 100_000])
def test_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What follows a write that did not end at a block goes through the page cache."""
    pwrite, calls = os.pwrite, []

    def short(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        return pwrite(fd, data[:most] if len(calls) == 1 else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    data = os.urandom(4 * BLOCK + 7 + most)
    assert _written(direct_directory(tmp_path) / "file", data) == data


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_refused_write_is_repeated_without_direct_io_and_other_errors_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pwrite, direct = os.pwrite, []

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if direct[-1]:
            raise OSError(code, "refused")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    data = os.urandom(3 * BLOCK)
    if code == errno.EINVAL:
        assert _written(direct_directory(tmp_path) / "file", data) == data
        assert direct == [True, False]
    else:
        with pytest.raises(OSError, match="refused"):
            _written(direct_directory(tmp_path) / "file", data)


def test_pages_are_dropped_whenever_many_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(direct_file, "_MAX_CACHED_NBYTES", BUFFER_NBYTES)
    monkeypatch.setattr(direct_file, "set_direct", lambda fd, *, on: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: dropped.append(rest))
    data = os.urandom(3 * BUFFER_NBYTES + 5)
    assert _written(tmp_path / "file", data) == data
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)] * 4, "after each buffer, and at the end"


def _written(path: Path, data: bytes) -> bytes:
    fd = os.open(path, NEW)
    try:
        with contextlib.closing(DirectWriter(fd, path)) as writer:
            writer.write(memoryview(data))
            writer.sync()
    finally:
        os.close(fd)
    return path.read_bytes()
