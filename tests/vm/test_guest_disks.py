"""The store on healthy and failing NVMe drives, against a real kernel, in the guest with disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.store import remove_stores
from penstock.storage.devices import inspect_device
from penstock.storage.engines import EngineName, choose_engine
from penstock.storage.errors import (
    ChecksumError,
    DeviceInUseError,
    LostExtentError,
    StorageWarning,
    TransferError,
)
from penstock.storage.header import DATA_OFFSET
from penstock.storage.leftovers import find_stores
from penstock.storage.store import Store, StoreOptions
from penstock.units import KiB, MiB
from tests.support.disks import Buffers
from tests.vm.disks import Mapped, bad_between, drive, drives, flakey, mapped, slow
from tests.vm.topology import DRIVES, UNREADABLE, UNWRITABLE

pytestmark = pytest.mark.vm

UNIT = 64 * KiB
BY_UNIT = StoreOptions(request_nbytes=UNIT, depth=4)


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    return name


@pytest.fixture
def layer() -> Iterator[Mapped]:
    with mapped(drive("healthy")) as device:
        yield device


def test_the_guest_has_its_drives_and_io_uring() -> None:
    assert {serial: inspect_device(drive(serial)).logical_block for serial in DRIVES} == DRIVES
    assert inspect_device(drive("healthy")).model == "QEMU NVMe Ctrl"
    assert choose_engine().name == "io_uring"


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "plain"])
@pytest.mark.parametrize("serial", ["healthy", "healthy-4kn"])
def test_a_raw_drive_returns_the_bytes_written_to_it(
    serial: str, engine: EngineName, verify: bool
) -> None:
    buffers = Buffers()
    with Store.create(drive(serial), engine=engine, verify=verify) as store:
        assert (store.volumes[0].is_device, store.volumes[0].direct) == (True, True)
        extents = [store.allocate(n, name=str(n)) for n in (1, 5000, UNIT, 3 * MiB + 1)]
        sources = [buffers.random(extent.stored_nbytes) for extent in extents]
        store.wait_all(store.start_write(e, s) for e, s in zip(extents, sources, strict=True))
        for extent, source in zip(extents, sources, strict=True):
            back = buffers.zeros(extent.stored_nbytes)
            store.start_read(extent, back).wait()
            assert back == source
        assert store.stats.retries == 0


def test_a_drive_under_device_mapper_counts_as_in_use(layer: Mapped) -> None:
    with pytest.raises(DeviceInUseError, match=f"is part of {Path(layer.path).name}"):
        Store.create(layer.under, erase=True)


@pytest.mark.parametrize(("verb", "place"), [("read", UNREADABLE), ("write", UNWRITABLE)])
def test_a_bad_sector_of_an_nvme_drive_fails_with_enodata(
    verb: str, place: int, engine: EngineName
) -> None:
    buffers = Buffers()
    with Store.create(drive("bad-sectors"), engine=engine, options=BY_UNIT) as store:
        store.allocate(place - DATA_OFFSET - 2 * UNIT, name="before the bad sector")
        bad, good = (store.allocate(4 * UNIT, name=name) for name in ("layers.1", "layers.2"))
        assert_only_bad_fails(store, verb, bad, good, buffers, place=place, code=errno.ENODATA)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_failing_range_of_a_disk_fails_with_eio(
    verb: str, layer: Mapped, engine: EngineName
) -> None:
    buffers = Buffers()
    with Store.create(layer.path, engine=engine, options=BY_UNIT) as store:
        bad, good = (store.allocate(4 * UNIT, name=name) for name in ("layers.1", "layers.2"))
        place = DATA_OFFSET + bad.start + 2 * UNIT
        store.start_write(bad, buffers.random(4 * UNIT)).wait()
        layer.load(bad_between(layer.under, place, place + 4096))
        assert_only_bad_fails(store, verb, bad, good, buffers, place=place, code=errno.EIO)


def assert_only_bad_fails(
    store: Store, verb: str, bad: object, good: object, buffers: Buffers, *, place: int, code: int
) -> None:
    """Check that a transfer of `bad` fails at `place` while transfers of `good` succeed."""
    path, lane, back = store.volumes[0].path, buffers.random(4 * UNIT), buffers.zeros(4 * UNIT)
    if verb == "read" and code == errno.ENODATA:
        store.start_write(bad, lane).wait()  # type: ignore[arg-type]
    move = store.start_read if verb == "read" else store.start_write
    failing = move(bad, lane)  # type: ignore[operator]
    source = buffers.random(4 * UNIT)
    store.start_write(good, source).wait()  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=rf"{verb} of layers\.1 failed: {path}") as failed:
        failing.wait()

    error = failed.value
    assert (error.extent, error.path, error.offset) == ("layers.1", path, place)
    assert (error.length, error.errno) == (UNIT, code)
    assert store.stats.retries == 3
    store.start_read(good, back).wait()  # type: ignore[arg-type]
    assert back == source
    if verb == "write":
        with pytest.raises(LostExtentError, match=r"layers\.1"):
            store.start_read(bad, back)  # type: ignore[arg-type]


def test_a_disk_that_recovers_is_used_again(layer: Mapped, engine: EngineName) -> None:
    buffers = Buffers()
    with Store.create(layer.path, engine=engine) as store:
        extent = store.allocate(4 * UNIT, name="moments")
        source, back = buffers.random(4 * UNIT), buffers.zeros(4 * UNIT)
        store.start_write(extent, source).wait()
        layer.load(flakey(layer.under))
        for move in (store.start_read, store.start_write):
            with pytest.raises(TransferError) as failed:
                move(extent, back).wait()
            assert failed.value.errno == errno.EIO
        layer.repair()
        store.start_write(extent, source).wait()
        store.start_read(extent, back).wait()

        assert back == source


@pytest.mark.parametrize(
    "lie", [("drop_writes",), ("corrupt_bio_byte", "77", "r", "1", "0")], ids=lambda lie: lie[0]
)
def test_a_disk_that_loses_or_corrupts_writes_is_detected(
    lie: tuple[str, ...], layer: Mapped, engine: EngineName
) -> None:
    buffers = Buffers()
    with Store.create(layer.path, engine=engine, verify=True, options=BY_UNIT) as store:
        extent = store.allocate(4 * UNIT, name="moments")
        first, second = buffers.zeros(4 * UNIT), buffers.zeros(4 * UNIT)
        second[:] = bytes([200]) * (4 * UNIT)
        store.start_write(extent, first).wait()
        layer.load(flakey(layer.under, *lie))
        store.start_write(extent, second).wait()  # the disk reports success
        with pytest.raises(ChecksumError, match=r"moments: .* different bytes"):
            store.start_read(extent, first).wait()
        layer.repair()
        store.start_write(extent, second).wait()
        store.start_read(extent, first).wait()

        assert first == second


def test_closing_waits_for_a_slow_disk(engine: EngineName) -> None:
    under, buffers = drive("healthy"), Buffers()
    with mapped(under, slow(under, read_ms=0, write_ms=100)) as layer:
        store = Store.create(layer.path, engine=engine)
        extents = [store.allocate(UNIT, name=str(i)) for i in range(4)]
        tickets = [store.start_write(extent, buffers.random(UNIT)) for extent in extents]

        assert store.close() == []
        assert all(ticket.done() for ticket in tickets)


HANG = """
import sys, warnings
from penstock.storage.store import Store
from penstock.units import KiB
from tests.support.disks import Buffers
from tests.vm.disks import Mapped

engine, scene, *layer = sys.argv[1:]
layer = Mapped(*layer)
store = Store.create(layer.path, engine=engine)
extent = store.allocate(64 * KiB, name="stuck")
layer.hang()
if scene == "busy":
    ticket = store.start_write(extent, Buffers().random(64 * KiB))
    ticket.settle(1)
    print(ticket.done(), end=" ")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    hanging = store.close(timeout=0.2)
layer.resume()
print([h.replace(layer.path, "DISK") for h in hanging], [w.category.__name__ for w in said])
if scene == "busy":
    ticket.settle(60)
    print(ticket.done(), ticket.failure(), end=" ")
"""


@pytest.mark.parametrize(
    ("scene", "says"),
    [
        ("busy", "False ['write of 65536 B at 1048576 of DISK'] ['StorageWarning']\nTrue None "),
        ("idle", "['removal of DISK'] ['StorageWarning']\n"),
    ],
    ids=["busy", "idle"],
)
def test_closing_a_store_on_a_hung_disk_returns(
    engine: EngineName, scene: str, says: str, layer: Mapped
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG, engine, scene, layer.name, layer.under, layer.path],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (says, 0), done.stderr
    if scene == "busy":  # the removal of an idle store may have finished when the disk answered
        assert [store.state for store in find_stores([layer.path])] == ["left"]
    assert {removed.kept_because for removed in remove_stores([layer.path])} <= {""}
    assert find_stores([layer.path]) == []


def test_a_removed_drive_raises_an_error_and_the_store_closes(engine: EngineName) -> None:
    device, buffers = drive("fragile"), Buffers()
    store = Store.create(device, engine=engine, erase=True)
    extent = store.allocate(4 * UNIT, name="moments")
    lane = buffers.random(4 * UNIT)
    store.start_write(extent, lane).wait()
    block = os.path.realpath(f"/sys/block/{Path(device).name}/device")
    (controller,) = (p for p in Path("/sys/class/nvme").iterdir() if _is_of(p, block))
    (controller / "device/remove").write_text("1")
    try:
        for move in (store.start_read, store.start_write):
            with pytest.raises(TransferError, match=r"of moments failed: .* No such dev") as failed:
                move(extent, lane).wait()
            assert (failed.value.path, failed.value.errno) == (device, errno.ENODEV)
        with pytest.warns(StorageWarning, match="could not be removed"):
            assert store.close() == []
    finally:
        Path("/sys/bus/pci/rescan").write_text("1")
        _wait_for("fragile")


def _is_of(controller: Path, block: str) -> bool:
    """Return whether the controller is that of the drive with this directory."""
    return os.path.realpath(controller) == block or (Path(block) / controller.name).exists()


def _wait_for(serial: str) -> None:
    end = time.monotonic() + 30
    while serial not in drives():
        assert time.monotonic() < end, f"{serial} did not come back"
        time.sleep(0.1)
