"""A bit that changes on the disk is an error of the next read that covers it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from penstock.storage.engines import EngineName
from penstock.storage.errors import ChecksumError, UnwrittenExtentError
from penstock.storage.layout import Extent
from penstock.storage.store import Store, StoreOptions
from penstock.units import KiB
from tests.conformance.store_variants import CAPACITY, SMALL, UNIT, StoreVariant
from tests.support.bit_flips import BLOCK, flip_any_bit, flip_bit, locate
from tests.support.disks import Buffers, direct_directory


@pytest.fixture(params=[1, 3], ids=["one path", "striped"])
def striped(request: pytest.FixtureRequest, tmp_path: Path, engine: EngineName) -> Store:
    """A store with checksums, over one path or with uneven stripes over three."""
    paths = [direct_directory(tmp_path) / str(i) for i in range(request.param)]
    for path in paths:
        path.mkdir()
    weights = [1.0, 2.0, 1.0][: len(paths)] if len(paths) > 1 else None
    options = StoreOptions(
        request_nbytes=128 * KiB, depth=4, stripe_nbytes=2 * UNIT, weights=weights
    )
    return Store.create(paths, CAPACITY, engine=engine, options=options)


def written(store: Store, buffers: Buffers, nbytes: int, name: str) -> tuple[Extent, memoryview]:
    extent = store.allocate(nbytes, name=name)
    source = buffers.random(extent.stored_nbytes)
    store.start_write(extent, source).wait()
    return extent, source


def assert_detected(store: Store, extent: Extent, back: memoryview, place: tuple[str, int]) -> None:
    with pytest.raises(ChecksumError, match="the disk returned different bytes") as wrong:
        store.start_read(extent, back).wait()
    assert (wrong.value.extent, wrong.value.path, wrong.value.offset) == (extent.name, *place)
    assert re.search(rf"^{re.escape(extent.name)}: .*{re.escape(place[0])}", str(wrong.value))
    assert str(place[1]) in str(wrong.value)


def test_a_flipped_bit_raises_an_error_that_names_the_extent_and_the_place(
    variant: StoreVariant, buffers: Buffers
) -> None:
    with variant.create() as store:
        extent, source = written(store, buffers, 4 * UNIT, "layers.3.moments")
        place = flip_bit(store, extent, 2 * UNIT + 77)
        back = buffers.zeros(4 * UNIT)
        if not variant.verify:
            store.start_read(extent, back).wait()
            assert back != source
            return

        assert_detected(store, extent, back, place)
        store.start_read(extent, back[: 2 * UNIT]).wait()  # other units are intact
        store.start_write(extent, source).wait()
        store.start_read(extent, back).wait()
        assert back == source


def test_every_flip_in_extents_of_odd_sizes_is_detected(striped: Store, buffers: Buffers) -> None:
    draw = random.Random(22)
    with striped as store:
        sizes = [1, 4095, 4096, UNIT - 1, UNIT + 1, 3 * UNIT, 9 * UNIT + 777, 21 * UNIT + 4097]
        extents = [written(store, buffers, nbytes, f"extent {nbytes}") for nbytes in sizes]
        room = buffers.zeros(22 * UNIT + 8192)
        for extent, source in extents * 4:
            back = room[: extent.stored_nbytes]
            at, bit = draw.randrange(extent.nbytes), draw.randrange(8)
            assert_detected(store, extent, back, flip_bit(store, extent, at, bit))
            flip_bit(store, extent, at, bit)
            store.start_read(extent, back).wait()
            assert back == source


def test_a_part_is_refused_only_if_the_flip_is_in_it(striped: Store, buffers: Buffers) -> None:
    with striped as store:
        extent, source = written(store, buffers, 10 * UNIT + 4096, "weights")
        flip_bit(store, extent, 6 * UNIT + 11)
        for first, count in [(0, 6), (7, 3), (5, 1), (6, 1), (4, 4), (0, 10)]:
            back = buffers.zeros(count * UNIT)
            ticket = store.start_read(extent, back, offset=first * UNIT)
            if first <= 6 < first + count:
                with pytest.raises(ChecksumError) as wrong:
                    ticket.wait()
                assert wrong.value.extent_offset == 6 * UNIT
            else:
                ticket.wait()
                assert back == source[first * UNIT : (first + count) * UNIT]
        tail = buffers.zeros(4096)
        store.start_read(extent, tail, offset=10 * UNIT).wait()
        place = flip_bit(store, extent, 10 * UNIT + 4095)
        with pytest.raises(ChecksumError) as wrong:
            store.start_read(extent, tail, offset=10 * UNIT).wait()
        assert (wrong.value.path, wrong.value.offset) == place


def test_a_flip_in_the_padding_of_an_extent_is_detected(striped: Store, buffers: Buffers) -> None:
    with striped as store:
        extent, _ = written(store, buffers, 4096 + 100, "padded")
        assert_detected(
            store, extent, buffers.zeros(8192), flip_bit(store, extent, extent.stored_nbytes - 1)
        )


def test_a_write_that_the_disk_forgot_is_detected(striped: Store, buffers: Buffers) -> None:
    """The disk acknowledged the second write of some units and still has the bytes of the first."""
    with striped as store:
        extent, source = written(store, buffers, 8 * UNIT, "moments")
        volume, at = locate(store, extent, 3 * UNIT)
        before = volume.read_block(at, BLOCK)
        new = buffers.random(2 * UNIT)
        store.start_write(extent, new, offset=3 * UNIT).wait()
        back = buffers.zeros(8 * UNIT)
        store.start_read(extent, back).wait()
        assert back == bytes(source[: 3 * UNIT]) + bytes(new) + bytes(source[5 * UNIT :])

        volume.write_block(at, before)

        assert_detected(store, extent, back, (volume.data_path, at))
        place = flip_bit(store, extent, 4 * UNIT)
        with pytest.raises(ChecksumError) as wrong:
            store.start_read(extent, back[:UNIT], offset=4 * UNIT).wait()
        assert (wrong.value.path, wrong.value.offset) == place


def test_bytes_that_were_never_written_cannot_be_read(striped: Store, buffers: Buffers) -> None:
    with striped as store:
        extent = store.allocate(6 * UNIT, name="gradients")
        back = buffers.random(6 * UNIT)
        with pytest.raises(UnwrittenExtentError, match=r"gradients: the unit at .* never written"):
            store.start_read(extent, back).wait()
        store.start_write(extent, back[: 2 * UNIT], offset=2 * UNIT).wait()
        store.start_read(extent, back[: 2 * UNIT], offset=2 * UNIT).wait()
        flip_any_bit(store, extent, random.Random(1))  # the rest has no bytes that could be wrong
        for first in (0, 4):
            with pytest.raises(UnwrittenExtentError):
                store.start_read(extent, back[:UNIT], offset=first * UNIT).wait()


def test_without_checksums_unwritten_bytes_can_be_read(
    tmp_path: Path, engine: EngineName, buffers: Buffers
) -> None:
    with Store.create(
        direct_directory(tmp_path), CAPACITY, engine=engine, verify=False, options=SMALL
    ) as store:
        extent = store.allocate(UNIT, name="zeros")
        back = buffers.random(UNIT)
        store.start_read(extent, back).wait()
        assert back == bytes(UNIT)
