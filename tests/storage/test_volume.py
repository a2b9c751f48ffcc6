"""Volumes: files, and raw devices, for which files stand in here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.storage import store_files, volume
from penstock.storage.devices import Device
from penstock.storage.direct_file import DirectFile
from penstock.storage.errors import (
    DeviceInUseError,
    DiskFullError,
    PathError,
    StoreInUseError,
)
from penstock.storage.header import DATA_OFFSET, HEADER_NBYTES, Header
from penstock.storage.layout import MIN_ALIGNMENT, Layout
from penstock.storage.store_files import _largest_capacity, _provisional_header
from penstock.storage.volume import create_volume, open_volume
from penstock.units import KiB, MiB
from tests.support.disks import direct_directory

SIZE = 5 * MiB + 12 * KiB
MakeDevice = Callable[..., Path]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    """Return a function that makes a file of ones which counts as a block device."""
    found: dict[str, Device] = {}

    def make(name: str = "sdz", nbytes: int = SIZE, **fields: object) -> Path:
        path = direct_directory(tmp_path) / name
        path.write_bytes(b"\x01" * nbytes)
        values = {"uses": (), "signatures": (), "logical_block": 512} | fields
        found[str(path)] = Device(
            path=str(path),
            number="8:0",
            model="",
            nbytes=nbytes,
            **values,  # type: ignore[arg-type]
        )
        return path

    monkeypatch.setattr(volume, "_is_device", lambda path: str(path) in found)
    monkeypatch.setattr(volume, "inspect_device", lambda path: found[str(path)])
    monkeypatch.setattr(Path, "is_block_device", lambda path: str(path) in found)
    return make


def header() -> Header:
    return _provisional_header(uuid4())


def test_a_device_holds_what_is_left_after_the_header(device: MakeDevice) -> None:
    claimed = create_volume(device(), uuid4(), header(), erase=False)
    try:
        assert (claimed.is_device, claimed.reserved) == (True, 0)
        claimed.reserve(SIZE - DATA_OFFSET)
        assert claimed.reserved == SIZE - DATA_OFFSET
        with pytest.raises(DiskFullError) as error:
            claimed.reserve(SIZE - DATA_OFFSET + 1)
        assert (error.value.wanted, error.value.free) == (
            SIZE - DATA_OFFSET + 1,
            SIZE - DATA_OFFSET,
        )
        assert claimed.reserved == SIZE - DATA_OFFSET
    finally:
        claimed.close()


def test_a_device_smaller_than_a_header_has_no_space(device: MakeDevice) -> None:
    claimed = create_volume(device(nbytes=DATA_OFFSET // 2), uuid4(), header(), erase=False)
    with pytest.raises(DiskFullError) as error:
        claimed.reserve(1)
    assert error.value.free == 0
    claimed.close()


def test_removing_a_device_erases_its_header_and_nothing_else(device: MakeDevice) -> None:
    path, written = device(), header()
    claimed = create_volume(path, uuid4(), written, erase=False)
    assert path.read_bytes()[: len(written.to_bytes())] == written.to_bytes()
    claimed.remove()
    data = path.read_bytes()
    assert data[:HEADER_NBYTES] == bytes(HEADER_NBYTES)
    assert data[HEADER_NBYTES:] == b"\x01" * (SIZE - HEADER_NBYTES)
    assert claimed.fd == -1


@pytest.mark.parametrize("block", [512, 4096, 16 * KiB])
def test_blocks_are_at_least_as_large_as_those_of_the_device(
    device: MakeDevice, block: int
) -> None:
    claimed = create_volume(device(logical_block=block), uuid4(), header(), erase=False)
    assert claimed.alignment == max(MIN_ALIGNMENT, block)
    claimed.close()


@pytest.mark.parametrize("nbytes", [SIZE, 3 * MiB, MiB + 4 * KiB, 8 * KiB])
def test_old_signatures_at_the_start_and_the_end_are_erased(
    device: MakeDevice, nbytes: int
) -> None:
    path = device(nbytes=nbytes, signatures=("ext4",))
    create_volume(path, uuid4(), header(), erase=True).remove()
    data = path.read_bytes()
    assert len(data) == nbytes
    start, end = min(2 * DATA_OFFSET, nbytes), max(0, nbytes - DATA_OFFSET)
    assert data[:start] == bytes(start)
    assert data[end:] == bytes(nbytes - end)
    if nbytes == SIZE:
        assert b"\x01" * MiB in data, "the middle stays"


def test_a_device_without_signatures_keeps_its_bytes(device: MakeDevice) -> None:
    path = device()
    create_volume(path, uuid4(), header(), erase=False).remove()
    assert path.read_bytes()[HEADER_NBYTES:] == b"\x01" * (SIZE - HEADER_NBYTES)


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EBUSY, DeviceInUseError), (errno.EACCES, PermissionError)]
)
def test_a_device_that_cannot_be_opened_is_in_use_or_the_error_stays(
    device: MakeDevice, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    path = device()
    asked = []

    def refuse(path: object, flags: int) -> DirectFile:
        asked.append(flags)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(volume, "_open", refuse)
    with pytest.raises(kind):
        create_volume(path, uuid4(), header(), erase=False)
    wanted = StoreInUseError if code == errno.EBUSY else PermissionError
    with pytest.raises(wanted):
        open_volume(path)
    assert asked == [os.O_RDWR | os.O_EXCL] * 2, "the kernel refuses a second user"


def test_a_locked_volume_is_in_use_and_no_descriptor_is_left(
    device: MakeDevice, tmp_path: Path
) -> None:
    path, before = device(), len(os.listdir("/proc/self/fd"))
    first = create_volume(path, uuid4(), header(), erase=False)
    with pytest.raises(StoreInUseError):
        open_volume(path)
    with pytest.raises(StoreInUseError):
        create_volume(path, uuid4(), header(), erase=False)
    first.close()
    again = open_volume(path)
    assert (again.path, again.data_path, again.is_device) == (str(path), str(path), True)
    assert again.read_block(0, 100) == path.read_bytes()[:100]
    again.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_opened_file_is_no_device_and_has_the_alignment_of_its_disk(tmp_path: Path) -> None:
    created = create_volume(direct_directory(tmp_path), uuid4(), header(), erase=False)
    with pytest.raises(StoreInUseError):
        open_volume(created.data_path)
    created.close()
    opened = open_volume(created.data_path)
    assert (opened.is_device, opened.alignment) == (False, created.alignment)
    assert opened.alignment >= MIN_ALIGNMENT
    assert (
        opened.read_block(0, HEADER_NBYTES) == Path(created.data_path).read_bytes()[:HEADER_NBYTES]
    )
    opened.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_file_that_cannot_be_allocated_says_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    created = create_volume(direct_directory(tmp_path), uuid4(), header(), erase=False)
    asked = []

    def refuse(fd: int, nbytes: int) -> int:
        asked.append((fd, nbytes))
        return code

    monkeypatch.setattr(volume._native, "allocate_space", refuse)
    usage = os.statvfs(tmp_path)
    with pytest.raises(PathError if code == errno.EIO else DiskFullError) as error:
        created.reserve(MiB)
    if isinstance(error.value, DiskFullError):
        assert error.value.wanted == MiB
        assert error.value.free == pytest.approx(usage.f_bavail * usage.f_frsize, rel=0.2)
    assert asked == [(created.fd, DATA_OFFSET + MiB)]
    assert created.reserved == 0
    created.remove()


def test_a_volume_that_cannot_be_locked_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def refuse(fd: int, path: str) -> None:
        raise StoreInUseError(path, "a test")

    monkeypatch.setattr(volume, "_lock", refuse)
    with pytest.raises(StoreInUseError):
        create_volume(tmp_path, uuid4(), header(), erase=False)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("sizes", "pattern", "rounds"),
    [
        ((20 * MiB, 20 * MiB), (0, 1), 9),
        ((20 * MiB, 9 * MiB), (0, 1), 4),
        ((20 * MiB, 9 * MiB), (0, 1, 0), 4),
        ((11 * MiB, 20 * MiB, 20 * MiB), (0, 1, 2, 0), 2),
    ],
)
def test_devices_hold_as_many_rounds_as_the_smallest_share_allows(
    device: MakeDevice, sizes: tuple[int, ...], pattern: tuple[int, ...], rounds: int
) -> None:
    volumes = [
        create_volume(device(f"sd{n}", size), uuid4(), header(), erase=False)
        for n, size in enumerate(sizes)
    ]
    layout = Layout(pattern=pattern, stripe_nbytes=2 * MiB)
    capacity = _largest_capacity(volumes, layout)
    assert capacity == rounds * len(pattern) * 2 * MiB
    for claimed, nbytes in zip(volumes, layout.path_nbytes(capacity), strict=True):
        claimed.reserve(nbytes)
    more = layout.path_nbytes(capacity + layout.round_nbytes)
    assert any(n > s - DATA_OFFSET for n, s in zip(more, sizes, strict=True))
    for claimed in volumes:
        claimed.close()


def test_one_device_is_used_in_whole_blocks(device: MakeDevice) -> None:
    claimed = create_volume(device(nbytes=SIZE + 700), uuid4(), header(), erase=False)
    assert _largest_capacity([claimed], Layout(pattern=(0,))) == SIZE - DATA_OFFSET
    claimed.close()


def test_devices_without_space_for_one_round_are_full(device: MakeDevice) -> None:
    one = create_volume(device("one", DATA_OFFSET + 1 * KiB), uuid4(), header(), erase=False)
    with pytest.raises(DiskFullError) as error:
        _largest_capacity([one], Layout(pattern=(0,)))
    assert (error.value.wanted, error.value.free) == (2 * MiB, 1 * KiB)
    one.close()


def test_a_removal_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        data_path, path = "/mnt/a/data", "/mnt/a"

        def remove(self) -> None:
            raise OSError(errno.EIO, "broken")

    files = store_files.StoreFiles(uuid4(), [Stuck(), Stuck()], Layout(pattern=(0,)), 1)  # type: ignore[list-item]
    with pytest.warns(UserWarning, match="could not be removed .*broken"):
        assert store_files.remove_store_files(files, 1.0) == []
    monkeypatch.setattr(store_files, "_finishes_within", lambda timeout, work: timeout > 1)
    with pytest.warns(UserWarning, match=r"no response in 1 s.*penstock store rm /mnt/a"):
        assert store_files.remove_store_files(files, 1.0) == ["removal of /mnt/a/data"] * 2
    assert store_files.remove_store_files(files, 2.0) == []
