"""Storage rates of simulated and real disks. The probe leaves nothing behind."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import pytest

from penstock.errors import ProbeError
from penstock.probe import storage
from penstock.probe.measurement import Progress
from penstock.probe.storage import ALIGNMENT, ScratchFile
from penstock.units import GiB, KiB, MiB
from tests.support.probing import TINY, make_tiny, no_thread_is_left


@pytest.fixture
def tiny(monkeypatch):
    make_tiny(monkeypatch)


class FakeDisk:
    """Serves one request at a time at a fixed rate, with its own clock."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now, self.written = rate, 0.0, set()

    def clock(self):
        return self.now

    @contextlib.contextmanager
    def mover(self, buffer, *, block, depth):
        assert len(buffer) >= block * depth

        def move(operation, offsets):
            for offset in offsets:
                span = set(range(offset, offset + block, 64 * KiB))
                assert operation == "write" or span <= self.written, "read an unwritten block"
                self.written |= span
                self.now += block / self.rate

        yield move

    def finish_writes(self):
        pass

    def drop_page_cache(self):
        pass


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("operation", ["read", "write", "both"])
def test_a_disk_of_known_rate_is_reported_at_that_rate(operation, depth):
    disk, request = FakeDisk(2.5e9), storage.Request(operation, 64 * KiB, depth)
    benchmark = storage.StorageBenchmark(disk, [request], disk.clock)
    benchmark.fill(64 * MiB, 1.0)

    assert benchmark.rate(request, TINY).median == pytest.approx(2.5e9)


def test_a_slow_disk_gets_a_small_file():
    disk, request = FakeDisk(10e6), storage.Request("read", MiB, 32)
    benchmark = storage.StorageBenchmark(disk, [request], disk.clock)
    benchmark.fill(GiB, 1.0)

    assert benchmark.nbytes == 16 * MiB
    with pytest.raises(ProbeError, match=r"needs a file of 32.0 MiB, .* allowed for 16.0 MiB"):
        benchmark.rate(request, TINY)


def test_at_least_one_block_is_written_however_slow_the_disk():
    disk, request = FakeDisk(10e6), storage.Request("read", MiB, 1)
    benchmark = storage.StorageBenchmark(disk, [request], disk.clock)
    benchmark.fill(GiB, 0.0)

    assert benchmark.rate(request, TINY).median == pytest.approx(10e6)


def test_the_file_uses_at_most_five_percent_of_the_free_space(tmp_path, monkeypatch):
    stats = os.statvfs(tmp_path)
    assert storage.max_file_size(tmp_path) <= min(GiB, stats.f_bavail * stats.f_frsize / 20)
    monkeypatch.setattr(storage, "MAX_SHARE", 0.0)
    progress = Progress(0)
    result = probe_storage(tmp_path, progress)
    assert result is None
    assert "less than 1 MiB" in progress.notes[0]


def probe_storage(directory: Path, progress: Progress):
    from penstock.machine.machine import StoragePath

    path, requested = StoragePath(path=str(directory)), storage.requests(quick=True)
    return progress.attempt("it", lambda: storage.probe_path(path, requested, TINY, progress))


@pytest.mark.parametrize("location", ["tmp_path", "/dev/shm"])
def test_storage_is_measured_and_nothing_is_left_behind(location, tmp_path, tiny):
    directory = tmp_path if location == "tmp_path" else Path(location)
    if not os.access(directory, os.W_OK):
        pytest.skip(f"{directory} does not exist")
    before = set(directory.iterdir())
    progress = Progress(6)
    with no_thread_is_left():
        path = probe_storage(directory, progress)
    assert [(r.operation, r.depth) for r in path.rates] == [
        ("write", 1), ("write", 3), ("read", 1), ("read", 3), ("both", 1),
        ("both", 3),
    ]  # fmt: skip
    assert path.direct or any("does not support direct I/O" in note for note in progress.notes)
    assert set(directory.iterdir()) == before


def test_a_path_that_is_not_a_directory_is_not_written_to(tmp_path, tiny):
    (tmp_path / "disk.img").write_bytes(b"precious")
    progress = Progress(0)
    assert probe_storage(tmp_path / "disk.img", progress) is None
    assert progress.notes == [
        "it: not measured: it is not a directory; the probe only writes to directories"
    ]
    assert (tmp_path / "disk.img").read_bytes() == b"precious"


def test_a_file_system_without_direct_io_is_measured_with_a_note(tmp_path, tiny, monkeypatch):
    real = os.open

    def no_direct(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_direct)
    progress = Progress(6)
    path = probe_storage(tmp_path, progress)
    assert path.direct is False
    assert len(path.rates) == 6
    assert "this file system does not support direct I/O" in progress.notes[0]


def test_without_o_tmpfile_the_name_is_removed_immediately(tmp_path, monkeypatch):
    real, opened = os.open, []

    def no_tmpfile(path, flags, *rest):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        opened.append(path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_tmpfile)
    with ScratchFile(tmp_path) as file:
        assert opened
        assert list(tmp_path.iterdir()) == []
        noise = storage._random_buffer(3 * ALIGNMENT)
        with file.mover(noise, block=ALIGNMENT, depth=3) as move:
            move("write", [0, 4096, 8192])
        back = memoryview(mmap.mmap(-1, 3 * ALIGNMENT))
        with file.mover(back, block=ALIGNMENT, depth=3) as move:
            move("read", [8192, 4096, 0])
            assert [back[at : at + 4096] for at in (8192, 4096, 0)] == [
                noise[at : at + 4096] for at in (0, 4096, 8192)
            ]
            with pytest.raises(ProbeError, match="the file ends at 12288"):
                move("read", [0, 12288])
            move("read", [0])  # the mover still works after an error
