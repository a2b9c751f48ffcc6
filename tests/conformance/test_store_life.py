"""Creation and closing of a store, on every kind of disk."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import pytest

from penstock.storage.errors import StoreClosedError, StoreFullError
from penstock.storage.store import StoreOptions
from penstock.units import KiB, MiB
from tests.conformance.store_variants import UNIT, StoreVariant
from tests.support.disks import Buffers


def test_a_full_store_reports_how_much_was_needed_and_free(variant: StoreVariant) -> None:
    with variant.create(1 * MiB) as store:
        store.allocate(512 * KiB, name="first")

        with pytest.raises(StoreFullError, match=r"second needs 1\.00 MiB .* 512 KiB left") as full:
            store.allocate(1 * MiB, name="second")

        assert (full.value.wanted, full.value.free) == (1 * MiB, 512 * KiB)
        store.allocate(512 * KiB, name="the rest")


def test_every_byte_is_counted(variant: StoreVariant, buffers: Buffers) -> None:
    with variant.create() as store:
        extent = store.allocate(1 * MiB, name="counted")
        lane = buffers.random(1 * MiB)
        store.start_write(extent, lane).wait()
        first = store.stats
        store.start_write(extent, lane[: 2 * UNIT]).wait()
        store.start_read(extent, lane).wait()
        second = store.stats

    assert (first.written_nbytes, first.read_nbytes) == (1 * MiB, 0)
    assert (second.written_nbytes, second.read_nbytes) == (1 * MiB + 2 * UNIT, 1 * MiB)
    assert second.retries == 0


def test_a_closed_store_refuses_every_call(variant: StoreVariant, buffers: Buffers) -> None:
    store = variant.create()
    extent = store.allocate(UNIT, name="late")
    assert store.close() == []
    assert store.close() == []

    with pytest.raises(StoreClosedError):
        store.start_read(extent, buffers.zeros(UNIT))
    with pytest.raises(StoreClosedError):
        store.allocate(1, name="later")


def test_closing_ends_transfers_in_flight(variant: StoreVariant, buffers: Buffers) -> None:
    store = variant.create(options=StoreOptions(request_nbytes=UNIT, depth=1))
    extents = [store.allocate(1 * MiB, name=str(i)) for i in range(8)]
    lane = buffers.random(1 * MiB)
    tickets = [store.start_write(extent, lane) for extent in extents]

    assert store.close() == []

    assert all(ticket.done() for ticket in tickets)
    for ticket in tickets:
        assert ticket.failure() is None or isinstance(ticket.failure(), StoreClosedError)


def test_closing_leaves_nothing_behind(variant: StoreVariant, buffers: Buffers) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = variant.create()
    extent = store.allocate(UNIT, name="gone")
    store.start_write(extent, buffers.random(UNIT)).wait()
    store.close()

    assert len(os.listdir("/proc/self/fd")) == before
    if Path(variant.path).is_dir():
        assert os.listdir(variant.path) == []
    else:
        assert _magic(variant.path) == bytes(8)


def test_a_dropped_store_removes_itself(variant: StoreVariant) -> None:
    store = variant.create()
    data = store.volumes[0].data_path
    del store
    gc.collect()

    assert not Path(data).exists() or _magic(data) == bytes(8)


def _magic(path: str) -> bytes:
    with open(path, "rb", buffering=0) as disk:
        return disk.read(8)


def test_other_users_cannot_read_the_store(variant: StoreVariant) -> None:
    with variant.create() as store:
        data = Path(store.volumes[0].data_path)
        if data.is_block_device():
            pytest.skip("the administrator sets the mode of a device")
        assert stat.S_IMODE(data.stat().st_mode) == 0o600
        assert stat.S_IMODE(data.parent.stat().st_mode) == 0o700
