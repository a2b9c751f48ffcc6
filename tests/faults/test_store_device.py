"""Failing disks: the error and delay filters of nbdkit behind a loop device."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import _native
from penstock.storage.engines import EngineName, choose_engine
from penstock.storage.errors import (
    DeviceInUseError,
    DeviceNotEmptyError,
    DiskFullError,
    LostExtentError,
    TransferError,
)
from penstock.storage.store import Store, StoreOptions
from penstock.units import KiB, MiB
from tests.support.disks import Buffers, faulty_device, loop_device

DISK = 24 * MiB
UNIT = 64 * KiB


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    if name == "io_uring" and choose_engine().name != "io_uring":
        pytest.skip(choose_engine().reason)
    return name


@pytest.mark.parametrize("verify", [True, False])
def test_a_failing_disk_raises_an_error_with_name_path_offset_and_errno(
    tmp_path: Path, engine: EngineName, verify: bool
) -> None:
    buffers = Buffers()
    source = buffers.random(4 * UNIT)
    with (
        faulty_device(tmp_path, DISK) as disk,
        Store.create(disk.device, 8 * MiB, engine=engine, verify=verify) as store,
    ):
        good, bad = (store.allocate(4 * UNIT, name=name) for name in ("layers.0", "layers.1"))
        store.start_write(good, source).wait()
        disk.fail()
        with pytest.raises(TransferError, match=r"write of layers\.1 failed: /dev/") as caught:
            store.start_write(bad, source).wait()
        with pytest.raises(LostExtentError, match=r"layers\.1: 262144 B at 0 were lost"):
            store.start_read(bad, source)
        disk.repair()

        assert (caught.value.extent, caught.value.path) == ("layers.1", disk.device)
        assert (caught.value.errno, caught.value.length) == (errno.EIO, 4 * UNIT)
        assert caught.value.offset == 1 * MiB + bad.start
        assert store.stats.retries == 3
        back = buffers.zeros(4 * UNIT)
        store.start_read(good, back).wait()  # other extents are intact
        assert back == source
        store.start_write(bad, source).wait()
        store.start_read(bad, back).wait()
        assert back == source


def test_a_failing_read_raises_a_transfer_error(tmp_path: Path, engine: EngineName) -> None:
    buffers = Buffers()
    source = buffers.random(4 * UNIT)
    with (
        faulty_device(tmp_path, DISK) as disk,
        Store.create(disk.device, 8 * MiB, engine=engine) as store,
    ):
        extent = store.allocate(4 * UNIT, name="moments")
        store.start_write(extent, source).wait()
        disk.fail()
        with pytest.raises(TransferError, match=r"read of moments failed.*errno 5"):
            store.start_read(extent, source).wait()
        disk.repair()
        store.start_read(extent, source).wait()


def test_occasional_errors_are_retried(tmp_path: Path, engine: EngineName) -> None:
    buffers = Buffers()
    options = StoreOptions(request_nbytes=UNIT, depth=4)
    rates = ("error-pread-rate=3%", "error-pwrite-rate=3%")
    with (
        faulty_device(tmp_path, DISK, *rates) as disk,
        Store.create(disk.device, 16 * MiB, engine=engine, options=options) as store,
    ):
        extent = store.allocate(4 * MiB, name="often")
        source, back = buffers.random(4 * MiB), buffers.zeros(4 * MiB)
        disk.fail()  # three percent of the requests
        for _ in range(200):
            store.start_write(extent, source).wait()
            store.start_read(extent, back).wait()
            assert back == source
            if store.stats.retries > 0:
                break
        disk.repair()

        assert store.stats.retries > 0


CHILD = """
import os, signal, sys, warnings
from penstock.storage.store import Store
from penstock.units import KiB, MiB
from tests.support.disks import Buffers

device, engine, scene = sys.argv[1:]
store = Store.create(device, 8 * MiB, engine=engine)
extent = store.allocate(64 * KiB, name="stuck")
buffers = Buffers()
ticket = store.start_write(extent, buffers.random(64 * KiB))
if scene == "interrupt":
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        ticket.wait()
    except KeyboardInterrupt:
        print("interrupted", "done" if ticket.done() else "in flight")
else:
    ticket.settle(0.3)  # let a worker start it: a request that has not started is cancelled instead
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hanging = store.close(timeout=0.05)
    print("hanging", len(hanging), hanging[0])
    print("warning:", caught[0].message)
    ticket.settle()
    print("finally", ticket.failure())
"""


def run_child(device: str, engine: str, scene: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, device, engine, scene],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ctrl_c_ends_a_wait(tmp_path: Path, engine: EngineName) -> None:
    with faulty_device(tmp_path, DISK, "delay-write=600ms") as disk:
        assert run_child(disk.device, engine, "interrupt") == "interrupted in flight\n"


def test_closing_with_a_hung_disk_returns_and_names_the_requests(
    tmp_path: Path, engine: EngineName
) -> None:
    with faulty_device(tmp_path, DISK, "delay-write=1") as disk:
        output = run_child(disk.device, engine, "hang")

        assert f"hanging 1 write of 65536 B at 1048576 of {disk.device}" in output
        assert "still with the kernel" in output
        assert "finally None" in output


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_creating_on_a_full_disk_reports_how_much_was_needed_and_free(
    tmp_path: Path, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "allocate_space", lambda fd, nbytes: errno.ENOSPC)

    with pytest.raises(DiskFullError, match=r"needs 8\.00 MiB, .* free; .*store ls") as full:
        Store.create(tmp_path / "run", 8 * MiB)

    assert full.value.wanted == 8 * MiB
    assert full.value.free > 0
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.filterwarnings("ignore:.*O_DIRECT")
def test_a_full_file_system_is_reported(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mounted]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs to mount a tmpfs of 4 MiB")
    try:
        with pytest.raises(DiskFullError, match=r"needs 8\.00 MiB, and [0-9.]+ MiB are free"):
            Store.create(mounted, 8 * MiB)
        assert os.listdir(mounted) == []
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_device_smaller_than_the_capacity_is_refused(tmp_path: Path) -> None:
    with loop_device(tmp_path, 4 * MiB) as device:
        with pytest.raises(DiskFullError, match=r"needs 8\.00 MiB, and 3\.00 MiB are free"):
            Store.create(device, 8 * MiB)
        with Store.create(device) as store:  # the whole device
            assert store.stats.capacity == 3 * MiB


def test_a_device_with_a_file_system_is_refused_and_left_alone(tmp_path: Path) -> None:
    with loop_device(tmp_path, 8 * MiB) as device:
        made = subprocess.run(["mkfs.ext4", "-q", device], capture_output=True, check=False)
        if made.returncode != 0:
            pytest.skip("needs mkfs.ext4")
        before = Path(device).read_bytes()
        with pytest.raises(DeviceNotEmptyError, match="holds an ext2, ext3 or ext4 file system"):
            Store.create(device)
        assert Path(device).read_bytes() == before

        with Store.create(device, erase=True):
            pass
        with Store.create(device):  # no signature is left
            pass


def test_a_mounted_device_is_refused_even_with_erase(tmp_path: Path) -> None:
    with loop_device(tmp_path, 8 * MiB) as device, contextlib.ExitStack() as ending:
        mounted = tmp_path / "mounted"
        mounted.mkdir()
        subprocess.run(["mkfs.ext4", "-q", device], capture_output=True, check=False)
        tried = subprocess.run(["mount", device, mounted], capture_output=True, check=False)
        if tried.returncode != 0:
            pytest.skip("needs mkfs.ext4 and to mount it")
        ending.callback(subprocess.run, ["umount", mounted], check=True)

        with pytest.raises(DeviceInUseError, match=f"is mounted on {mounted}"):
            Store.create(device, erase=True)


def test_two_stores_cannot_share_a_device(tmp_path: Path) -> None:
    with loop_device(tmp_path, 8 * MiB) as device, Store.create(device):
        with pytest.raises((DeviceInUseError, DeviceNotEmptyError)):
            Store.create(device)
        with pytest.raises(DeviceInUseError):
            Store.create(device, erase=True)
