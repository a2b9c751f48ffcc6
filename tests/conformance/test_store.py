"""What a store promises, whatever engine moves the bytes and whatever holds them.

Both engines, on a file past the page cache, on a file system without O_DIRECT and on raw devices
of 512 B and 4 KiB sectors, with and without checksums.
"""

from __future__ import annotations

import gc
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import _native
from penstock.storage.building import StoreOptions
from penstock.storage.engines import EngineName, choose_engine
from penstock.storage.errors import (
    AlignmentError,
    ChecksumError,
    ExtentBusyError,
    StorageWarning,
    StoreClosedError,
    StoreFullError,
)
from penstock.storage.header import DATA_OFFSET
from penstock.storage.store import Store
from penstock.units import KiB, MiB
from tests.disks import Buffers, direct_directory, loop_device, memory_directory

CAPACITY = 16 * MiB
UNIT = 64 * KiB
SMALL = StoreOptions(request_nbytes=128 * KiB, depth=4)


@dataclass(frozen=True)
class Ground:
    """Where a store of one parametrisation goes."""

    path: str
    engine: EngineName
    verify: bool

    def create(self, capacity: int | str = CAPACITY, options: StoreOptions = SMALL) -> Store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StorageWarning)
            return Store.create(
                self.path, capacity, engine=self.engine, verify=self.verify, options=options
            )


@pytest.fixture(scope="module", params=["file", "tmpfs", "loop512", "loop4096"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "file":
        yield str(direct_directory(directory))
    elif request.param == "tmpfs":
        with memory_directory("conformance") as memory:
            yield str(memory)
    else:
        sector = int(request.param.removeprefix("loop"))
        with loop_device(directory, CAPACITY + 2 * MiB, sector=sector) as device:
            yield device


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    if name == "io_uring" and choose_engine().name != "io_uring":
        pytest.skip(choose_engine().reason)
    return name


@pytest.fixture(params=[True, False], ids=["verify", "plain"])
def ground(request: pytest.FixtureRequest, path: str, engine: EngineName) -> Ground:
    return Ground(path, engine, request.param)


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()


def test_what_is_written_comes_back(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        sizes = [1, 4096, 4097, UNIT, UNIT + 1, 1_000_003, 3 * MiB]
        written = {}
        for nbytes in sizes:
            extent = store.allocate(nbytes, name=f"of {nbytes}")
            written[extent] = buffers.random(extent.stored_nbytes)
            store.start_write(extent, written[extent]).wait()

        for extent, expected in written.items():
            back = buffers.zeros(extent.stored_nbytes)
            store.start_read(extent, back).wait()
            assert back == expected, extent


def test_many_in_flight_finish_in_any_order(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extents = [store.allocate(300 * KiB, name=f"e{i}") for i in range(20)]
        sources = [buffers.random(e.stored_nbytes) for e in extents]
        store.wait_all(store.start_write(e, s) for e, s in zip(extents, sources, strict=True))

        targets = [buffers.zeros(e.stored_nbytes) for e in extents]
        waiting = [store.start_read(e, t) for e, t in zip(extents, targets, strict=True)]
        seen = 0
        while waiting:
            done = store.wait_any(waiting)
            assert done
            seen += len(done)
            waiting = [ticket for ticket in waiting if ticket not in done]

        assert seen == 20
        assert targets == sources


def test_parts_can_be_moved_alone(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extent = store.allocate(5 * UNIT + 4096, name="parts")
        whole = buffers.random(extent.stored_nbytes)
        store.start_write(extent, whole).wait()
        middle = buffers.random(2 * UNIT)
        store.start_write(extent, middle, offset=UNIT).wait()

        tail = buffers.zeros(2 * UNIT + 4096)
        store.start_read(extent, tail, offset=3 * UNIT).wait()
        back = buffers.zeros(extent.stored_nbytes)
        store.start_read(extent, back).wait()

        assert tail == whole[3 * UNIT :]
        assert back[UNIT : 3 * UNIT] == middle
        assert back[:UNIT] == whole[:UNIT]


def test_extents_do_not_touch_each_other(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extents = [store.allocate(n, name=str(n)) for n in (5000, 4096, 70_000, 1)]
        sources = [buffers.random(e.stored_nbytes) for e in extents]
        for extent, source in zip(extents, sources, strict=True):
            store.start_write(extent, source).wait()
        again = buffers.random(extents[1].stored_nbytes)
        store.start_write(extents[1], again).wait()

        for extent, expected in zip(extents, [sources[0], again, *sources[2:]], strict=True):
            back = buffers.zeros(extent.stored_nbytes)
            store.start_read(extent, back).wait()
            assert back == expected


def test_a_full_store_says_wanted_and_free(ground: Ground) -> None:
    with ground.create(1 * MiB) as store:
        store.allocate(512 * KiB, name="first")

        with pytest.raises(StoreFullError, match=r"second needs 1\.00 MiB .* 512 KiB left") as full:
            store.allocate(1 * MiB, name="second")

        assert (full.value.wanted, full.value.free) == (1 * MiB, 512 * KiB)
        store.allocate(512 * KiB, name="the rest")


def test_what_does_not_fit_the_disk_is_refused(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extent = store.allocate(4 * UNIT, name="fussy")
        whole = buffers.zeros(4 * UNIT + 4096)

        with pytest.raises(AlignmentError, match=r"256 B after a multiple of 4096"):
            store.start_read(extent, whole[256 : 256 + UNIT])
        with pytest.raises(AlignmentError, match="offset 4096"):
            store.start_read(extent, whole[:UNIT], offset=4096)
        with pytest.raises(AlignmentError, match="neither a multiple of the unit"):
            store.start_read(extent, whole[:5000])
        with pytest.raises(AlignmentError, match="bytes 0 to 266240"):
            store.start_write(extent, whole)
        with pytest.raises(AlignmentError, match="wanted of a buffer"):
            store.start_write(extent, whole[:UNIT], nbytes=2 * UNIT)
        with pytest.raises(BufferError):
            store.start_read(extent, bytes(UNIT))
        assert store.stats.requests == 0


def test_transfers_never_overtake_each_other(ground: Ground, buffers: Buffers) -> None:
    options = StoreOptions(request_nbytes=UNIT, depth=1)
    with ground.create(options=options) as store:
        extent = store.allocate(8 * MiB, name="busy")
        source = buffers.random(extent.stored_nbytes)
        writing = store.start_write(extent, source)
        refused = ""
        try:
            store.start_read(extent, buffers.zeros(UNIT), offset=8 * MiB - UNIT).wait()
        except ExtentBusyError as busy:
            refused = str(busy)
        # Either the write was done before the read was asked for, or the read was refused.
        assert refused == "" or "read of bytes that a write is still moving" in refused
        writing.wait()
        store.start_read(extent, source).wait()


def test_a_dropped_ticket_keeps_its_buffer(ground: Ground) -> None:
    with ground.create() as store:
        extent = store.allocate(4 * MiB, name="dropped")
        arena = Buffers(8 * MiB)
        source = arena.random(extent.stored_nbytes)
        expected = bytes(source)
        store.start_write(extent, source)
        del arena, source
        gc.collect()
        fresh = Buffers(8 * MiB)
        back = fresh.zeros(extent.stored_nbytes)
        while True:
            try:
                store.start_read(extent, back).wait()
                break
            except ExtentBusyError:
                continue
        assert back == expected


def test_threads_share_a_store(ground: Ground, buffers: Buffers) -> None:
    failures: list[BaseException] = []
    with ground.create() as store:
        extents = [store.allocate(256 * KiB, name=f"of {i}") for i in range(4)]
        pairs = [(buffers.random(256 * KiB), buffers.zeros(256 * KiB)) for _ in extents]

        def work(number: int) -> None:
            source, target = pairs[number]
            try:
                for _ in range(10):
                    store.start_write(extents[number], source).wait()
                    store.start_read(extents[number], target).wait()
                    assert source == target
            except BaseException as failed:
                failures.append(failed)

        team = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()

    assert failures == []


def test_every_byte_is_counted_per_step_and_per_run(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extent = store.allocate(1 * MiB, name="counted")
        lane = buffers.random(1 * MiB)
        store.start_write(extent, lane).wait()
        first = store.end_step()
        store.start_write(extent, lane[: 2 * UNIT]).wait()
        store.start_read(extent, lane).wait()
        second = store.end_step()

    assert (first.step_written_nbytes, first.step_read_nbytes) == (1 * MiB, 0)
    assert (second.step_written_nbytes, second.step_read_nbytes) == (2 * UNIT, 1 * MiB)
    assert (second.written_nbytes, second.read_nbytes) == (1 * MiB + 2 * UNIT, 1 * MiB)
    assert (second.steps, second.again) == (2, 0)


def test_registered_memory_gives_the_same_bytes(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        registered = store.register(buffers.arena)
        extent = store.allocate(2 * MiB, name="registered")
        source, target = buffers.random(2 * MiB), buffers.zeros(2 * MiB)
        store.start_write(extent, source).wait()
        store.start_read(extent, target).wait()

    assert target == source
    assert registered in ((False,) if ground.engine == "threads" else (True, False))


def test_a_closed_store_is_closed(ground: Ground, buffers: Buffers) -> None:
    store = ground.create()
    extent = store.allocate(UNIT, name="late")
    assert store.close() == []
    assert store.close() == []

    with pytest.raises(StoreClosedError):
        store.start_read(extent, buffers.zeros(UNIT))
    with pytest.raises(StoreClosedError):
        store.allocate(1, name="later")


def test_closing_with_transfers_under_way_returns(ground: Ground, buffers: Buffers) -> None:
    store = ground.create(options=StoreOptions(request_nbytes=UNIT, depth=1))
    extents = [store.allocate(1 * MiB, name=str(i)) for i in range(8)]
    lane = buffers.random(1 * MiB)
    tickets = [store.start_write(extent, lane) for extent in extents]

    assert store.close() == []

    assert all(ticket.done for ticket in tickets)
    for ticket in tickets:
        assert ticket.failure() is None or isinstance(ticket.failure(), StoreClosedError)


def test_nothing_is_left_behind(ground: Ground, buffers: Buffers) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = ground.create()
    extent = store.allocate(UNIT, name="gone")
    store.start_write(extent, buffers.random(UNIT)).wait()
    store.close()

    assert len(os.listdir("/proc/self/fd")) == before
    if Path(ground.path).is_dir():
        assert os.listdir(ground.path) == []
    else:
        assert _magic(ground.path) == bytes(8)


def test_a_dropped_store_removes_itself(ground: Ground) -> None:
    store = ground.create()
    data = store.volumes[0].data_path
    del store
    gc.collect()

    assert not Path(data).exists() or _magic(data) == bytes(8)


def _magic(path: str) -> bytes:
    with open(path, "rb", buffering=0) as disk:
        return disk.read(8)


def test_a_kept_store_can_be_opened_again(ground: Ground, buffers: Buffers) -> None:
    store = ground.create()
    extents = [store.allocate(n, name=f"kept {n}") for n in (100, 2 * MiB, 5000)]
    sources = [buffers.random(e.stored_nbytes) for e in extents]
    data = store.volumes[0].data_path
    for extent, source in zip(extents, sources, strict=True):
        store.start_write(extent, source)
    store.close(keep=True)

    with Store.open(data, engine=ground.engine, verify=ground.verify) as again:
        assert again.uuid == store.uuid
        assert [(e.name, e.nbytes) for e in again] == [(e.name, e.nbytes) for e in extents]
        for extent, expected in zip(extents, sources, strict=True):
            back = buffers.zeros(extent.stored_nbytes)
            again.start_read(again[extent.name], back).wait()
            assert back == expected
        assert again.allocate(1, name="new").start >= extents[-1].start + 4096


def test_other_people_cannot_read_it(ground: Ground) -> None:
    with ground.create() as store:
        data = Path(store.volumes[0].data_path)
        if data.is_block_device():
            pytest.skip("a device's mode is the administrator's")
        assert stat.S_IMODE(data.stat().st_mode) == 0o600
        assert stat.S_IMODE(data.parent.stat().st_mode) == 0o700


def test_a_flipped_bit_is_a_named_error(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extent = store.allocate(4 * UNIT, name="layers.3.moments")
        source = buffers.random(4 * UNIT)
        store.start_write(extent, source).wait()
        _flip(store, DATA_OFFSET + extent.start + 2 * UNIT + 77)
        back = buffers.zeros(4 * UNIT)
        ticket = store.start_read(extent, back)

        if not ground.verify:
            ticket.wait()
            assert back != source
            return
        with pytest.raises(ChecksumError, match=r"layers\.3\.moments: .* other bytes") as wrong:
            ticket.wait()
        assert (wrong.value.extent, wrong.value.offset) == ("layers.3.moments", 2 * UNIT)
        store.start_read(extent, back[: 2 * UNIT]).wait()  # the rest of it is well
        store.start_write(extent, source).wait()
        store.start_read(extent, back).wait()
        assert back == source


def _flip(store: Store, offset: int) -> None:
    """One bit, straight on the disk."""
    volume = store.volumes[0]
    block = offset // 4096 * 4096
    held = bytearray(volume.read_block(block, 4096))
    held[offset - block] ^= 4
    volume.write_block(block, bytes(held))


def test_bytes_lie_on_disk_as_they_are(ground: Ground, buffers: Buffers) -> None:
    with ground.create() as store:
        extent = store.allocate(2 * UNIT, name="plain")
        source = buffers.random(2 * UNIT)
        store.start_write(extent, source).wait()
        volume = store.volumes[0]

        assert volume.read_block(DATA_OFFSET + extent.start, 2 * UNIT) == bytes(source)
        assert _native.crc32c(source) == _native.crc32c(
            volume.read_block(DATA_OFFSET + extent.start, 2 * UNIT)
        )
