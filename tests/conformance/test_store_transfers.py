"""Transfers of a store, with every engine and on every kind of disk."""

from __future__ import annotations

import gc
import threading

import pytest

from penstock.storage.errors import AlignmentError, ExtentBusyError
from penstock.storage.store import StoreOptions
from penstock.units import KiB, MiB
from tests.conformance.store_variants import UNIT, StoreVariant
from tests.support.disks import Buffers


def test_reads_return_what_was_written(variant: StoreVariant, buffers: Buffers) -> None:
    with variant.create() as store:
        sizes = [1, 4096, 4097, UNIT, UNIT + 1, 1_000_003, 3 * MiB]
        written = {}
        for nbytes in sizes:
            extent = store.allocate(nbytes, name=f"{nbytes} bytes")
            written[extent] = buffers.random(extent.stored_nbytes)
            store.start_write(extent, written[extent]).wait()

        for extent, expected in written.items():
            back = buffers.zeros(extent.stored_nbytes)
            store.start_read(extent, back).wait()
            assert back == expected, extent


def test_many_transfers_in_flight_finish_in_any_order(
    variant: StoreVariant, buffers: Buffers
) -> None:
    with variant.create() as store:
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


def test_parts_of_an_extent_can_be_transferred_alone(
    variant: StoreVariant, buffers: Buffers
) -> None:
    with variant.create() as store:
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


def test_extents_do_not_overlap(variant: StoreVariant, buffers: Buffers) -> None:
    with variant.create() as store:
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


def test_misaligned_transfers_are_refused(variant: StoreVariant, buffers: Buffers) -> None:
    with variant.create() as store:
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
        with pytest.raises(AlignmentError, match="do not fit in the buffer"):
            store.start_write(extent, whole[:UNIT], nbytes=2 * UNIT)
        with pytest.raises(BufferError):
            store.start_read(extent, bytes(UNIT))
        assert store.stats.requests == 0


def test_transfers_never_overtake_each_other(variant: StoreVariant, buffers: Buffers) -> None:
    options = StoreOptions(request_nbytes=UNIT, depth=1)
    with variant.create(options=options) as store:
        extent = store.allocate(8 * MiB, name="busy")
        source = buffers.random(extent.stored_nbytes)
        writing = store.start_write(extent, source)
        refused = ""
        try:
            store.start_read(extent, buffers.zeros(UNIT), offset=8 * MiB - UNIT).wait()
        except ExtentBusyError as busy:
            refused = str(busy)
        # Either the write was done before the read started, or the read was refused.
        assert refused == "" or "read of bytes that a write is still moving" in refused
        writing.wait()
        store.start_read(extent, source).wait()


def test_a_dropped_ticket_keeps_its_buffer(variant: StoreVariant) -> None:
    with variant.create() as store:
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


def test_a_settled_ticket_keeps_no_buffer(variant: StoreVariant) -> None:
    with variant.create() as store:
        extent = store.allocate(UNIT, name="settled")
        buffers = Buffers(MiB)
        ticket = store.start_write(extent, buffers.random(UNIT))
        ticket.settle()

        gc.collect()

        buffers.arena.reset()  # raises while a block is alive
        assert ticket.failure() is None


def test_several_threads_share_a_store(variant: StoreVariant, buffers: Buffers) -> None:
    failures: list[BaseException] = []
    with variant.create() as store:
        extents = [store.allocate(256 * KiB, name=f"extent {i}") for i in range(4)]
        pairs = [(buffers.random(256 * KiB), buffers.zeros(256 * KiB)) for _ in extents]

        def work(number: int) -> None:
            source, target = pairs[number]
            try:
                for _ in range(10):
                    store.start_write(extents[number], source).wait()
                    store.start_read(extents[number], target).wait()
                    assert source == target
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failures == []


def test_registered_memory_transfers_the_same_bytes(
    variant: StoreVariant, buffers: Buffers
) -> None:
    with variant.create() as store:
        registered = store.register(buffers.arena)
        extent = store.allocate(2 * MiB, name="registered")
        source, target = buffers.random(2 * MiB), buffers.zeros(2 * MiB)
        store.start_write(extent, source).wait()
        store.start_read(extent, target).wait()

    assert target == source
    assert registered in ((False,) if variant.engine == "threads" else (True, False))
