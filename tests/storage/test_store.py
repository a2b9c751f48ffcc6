"""Stores over several paths, invalid arguments, and file systems without O_DIRECT."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from penstock import _native
from penstock.storage import store as store_module
from penstock.storage.errors import ChecksumError, PathError, StorageWarning, StoreFullError
from penstock.storage.header import DATA_OFFSET
from penstock.storage.store import Store, StoreOptions
from penstock.storage.store_files import _finishes_within, _provisional_header
from penstock.storage.volume import create_volume
from penstock.units import KiB, MiB
from tests.support.disks import Buffers, direct_directory, memory_directory

UNIT = 64 * KiB


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1, 2)])
def test_a_striped_store_returns_the_bytes_that_were_written(
    tmp_path: Path, engine: str, weights: tuple[float, ...]
) -> None:
    direct_directory(tmp_path)
    buffers = Buffers()
    options = StoreOptions(weights=weights, stripe_nbytes=2 * UNIT, request_nbytes=UNIT)
    paths = [tmp_path / str(i) for i in range(len(weights))]
    with Store.create(paths, 16 * MiB, engine=engine, options=options) as store:  # type: ignore[arg-type]
        first = store.allocate(100_000, name="first")
        extent = store.allocate(3 * MiB + 5000, name="second")
        source = buffers.random(extent.stored_nbytes)
        store.start_write(first, buffers.random(first.stored_nbytes)).wait()
        store.start_write(extent, source).wait()
        back = buffers.zeros(extent.stored_nbytes)
        store.start_read(extent, back).wait()
        part = buffers.zeros(5 * UNIT)
        store.start_read(extent, part, offset=3 * UNIT).wait()
        written = [os.stat(v.data_path).st_size for v in store.volumes]

        assert back == source
        assert part == source[3 * UNIT : 8 * UNIT]
        shares = [size - 1 * MiB for size in written]
        assert [s / sum(shares) for s in shares] == pytest.approx(
            [w / sum(weights) for w in weights]
        )


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_transfer_knows_when_the_disk_had_finished(tmp_path: Path, engine: str) -> None:
    """Not when somebody looked: the last writes of a step are looked at when it ends."""
    direct_directory(tmp_path)
    with Store.create(tmp_path, 4 * MiB, engine=engine) as store:  # type: ignore[arg-type]
        extent = store.allocate(MiB, name="extent")
        started = time.perf_counter()
        ticket = store.start_write(extent, Buffers().random(extent.stored_nbytes))
        ticket.settle()
        looked = time.perf_counter()
        assert ticket.finished_at is not None
        assert started < ticket.finished_at < looked


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("verify", [True, False])
def test_an_extent_of_a_new_file_is_read_as_zeros_without_a_write(
    tmp_path: Path, engine: str, verify: bool
) -> None:
    buffers = Buffers()
    made: Any = {"engine": engine, "verify": verify}
    with Store.create(direct_directory(tmp_path), 16 * MiB, **made) as store:
        store.allocate(100_000, name="first")
        extent = store.allocate(3 * MiB + 5000, name="second")  # not a multiple of the unit
        back = buffers.random(extent.stored_nbytes)
        assert store.assume_zeros(extent)
        store.start_read(extent, back).wait()

        assert back == bytes(extent.stored_nbytes)
        assert store.stats.written_nbytes == 0

        source = buffers.random(extent.stored_nbytes)
        store.start_write(extent, source).wait()
        assert not store.assume_zeros(extent)
        store.start_read(extent, back).wait()
        assert back == source


def test_a_disk_that_was_written_to_is_not_assumed_to_have_zeros(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    with Store.create([tmp_path / "a", tmp_path / "b"], 8 * MiB) as store:  # which are measured
        extent = store.allocate(1 * MiB, name="first")

        assert not store.assume_zeros(extent)


def test_bytes_of_a_new_file_that_are_not_zeros_are_reported(tmp_path: Path) -> None:
    buffers = Buffers()
    with Store.create(direct_directory(tmp_path), 8 * MiB) as store:
        extent = store.allocate(1 * MiB, name="first")
        store.assume_zeros(extent)
        with open(store.volumes[0].data_path, "r+b") as file:
            file.seek(DATA_OFFSET + 5000)
            file.write(b"\1")

        with pytest.raises(ChecksumError):
            store.start_read(extent, buffers.zeros(extent.stored_nbytes)).wait()


def test_several_paths_are_measured(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    with Store.create([tmp_path / "a", tmp_path / "b"], 8 * MiB) as store:
        names = [os.path.dirname(os.path.dirname(v.data_path)) for v in store.volumes]

        assert names == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("paths", "capacity", "message"),
    [([], 1, "at least one path"), (["a", "a"], 1, "listed twice"),
     (["a"], 0, "at least 1 B, got 0"), (["a"], None, "a capacity is required")],
)  # fmt: skip
def test_invalid_paths_and_capacities_are_refused(
    tmp_path: Path, paths: list[str], capacity: int | None, message: str
) -> None:
    with pytest.raises(PathError, match=message):
        Store.create([tmp_path / path for path in paths], capacity)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_o_direct_is_used_with_a_warning() -> None:
    with memory_directory("warned") as directory:
        with pytest.warns(StorageWarning, match=r"no O_DIRECT, .* page cache"):
            store = Store.create(directory, 1 * MiB)
        assert store.volumes[0].direct is False
        store.close()


def test_a_failure_to_start_the_engine_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_directory(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(_native, "StoreEngine", fail)
    with pytest.raises(OSError, match="Cannot allocate"):
        Store.create(tmp_path, 1 * MiB)

    assert os.listdir(tmp_path) == []


def test_a_short_write_of_the_header_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_directory(tmp_path)
    monkeypatch.setattr(os, "pwritev", lambda *_: 512)

    # With a file name, the command line reports an error of the user's disk and not a bug.
    with pytest.raises(OSError, match="512 of 4096 B written") as caught:
        Store.create(tmp_path, 1 * MiB)

    assert str(caught.value.filename).startswith(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_work_at_the_end_is_done_even_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert _finishes_within(10, lambda: done.append(1)) is True
    assert done == [1]


def test_a_store_whose_device_does_not_answer_stays_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create([direct_directory(tmp_path)], 8 * MiB)
    file = Path(store.volumes[0].data_path)
    close = store_module._close_engine

    def hang(*args: Any) -> list[str]:
        close(*args)  # ends the threads of this test's store
        return ["a write of 1 MiB"]

    monkeypatch.setattr(store_module, "_close_engine", hang)

    assert store.close() == ["a write of 1 MiB"]
    assert file.exists()
    assert store.close() == []


def test_a_new_volume_names_its_owner_from_the_first_moment(tmp_path: Path) -> None:
    """Others find it then, and do not take it for a leftover."""
    header = _provisional_header(uuid4())
    volume = create_volume(direct_directory(tmp_path), header.uuid, header, erase=False)
    try:
        assert volume.file.read_blocks(0, len(header.to_bytes())) == header.to_bytes()
    finally:
        volume.close()


@pytest.mark.parametrize(
    ("wanted", "request_nbytes"),
    [(UNIT, UNIT), (UNIT + 1, 2 * UNIT), (1, UNIT), (3 * UNIT, 3 * UNIT)],
)
def test_requests_are_whole_units_and_queues_grow_with_the_paths(
    wanted: int, request_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum of a unit is computed over one request."""
    made: list[tuple[Any, ...]] = []
    engine = _native.StoreEngine
    monkeypatch.setattr(
        _native, "StoreEngine", lambda *given: (made.append(given), engine(*given))[1]
    )
    direct_directory(tmp_path)
    options = StoreOptions(request_nbytes=wanted, depth=3, workers=2, weights=(1, 1))
    paths = [tmp_path / "a", tmp_path / "b"]
    with Store.create(paths, MiB, engine="threads", options=options) as store:
        fds = [volume.fd for volume in store.volumes]
        assert made == [("threads", fds, store.alignment, request_nbytes, 6, 2)]


def test_a_store_is_full_at_its_last_byte(tmp_path: Path) -> None:
    direct_directory(tmp_path)
    with Store.create(tmp_path, 8 * 4096) as store:
        first = store.allocate(1, name="first")
        assert (first.start, first.stored_nbytes, first.nbytes) == (0, 4096, 1)
        second = store.allocate(6 * 4096, name="second")
        assert second.start == 4096
        with pytest.raises(StoreFullError):
            store.allocate(4097, name="third")
        with pytest.raises(ValueError, match="already an extent"):
            store.allocate(1, name="second")
        with pytest.raises(ValueError, match="at least 1 byte"):
            store.allocate(0, name="none")
        store.allocate(4096, name="third")
        assert (store.stats.used, store.stats.capacity) == (8 * 4096, 8 * 4096)


def test_requests_that_a_device_keeps_are_warned_of_and_their_buffers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaked: list[object] = []
    monkeypatch.setattr(store_module, "_leaked", leaked)
    files: Any = SimpleNamespace(volumes=[SimpleNamespace(data_path="/mnt/a/data")])
    kept = [(True, 0, 4096, 8192)]
    engine: Any = SimpleNamespace(close=lambda timeout: kept if timeout == 1.5 else [])

    with pytest.warns(
        StorageWarning, match=r"1 requests .* write of 8192 B at 4096 of /mnt/a/data"
    ):
        found = store_module._close_engine(engine, 1.5, files, "a buffer", "another")
    assert found == ["write of 8192 B at 4096 of /mnt/a/data"]
    assert leaked == [files, "a buffer", "another"]
    assert store_module._close_engine(engine, 2.0, files, "a buffer") == []
    assert len(leaked) == 3
