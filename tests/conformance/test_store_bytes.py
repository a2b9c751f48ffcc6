"""The bytes on disk, and the detection of corrupted ones."""

from __future__ import annotations

import pytest

from penstock import _native
from penstock.storage.errors import ChecksumError
from penstock.storage.header import DATA_OFFSET
from penstock.storage.store import Store
from tests.conformance.store_variants import UNIT, StoreVariant
from tests.support.disks import Buffers


def test_a_flipped_bit_raises_an_error_that_names_the_extent(
    variant: StoreVariant, buffers: Buffers
) -> None:
    with variant.create() as store:
        extent = store.allocate(4 * UNIT, name="layers.3.moments")
        source = buffers.random(4 * UNIT)
        store.start_write(extent, source).wait()
        _flip(store, DATA_OFFSET + extent.start + 2 * UNIT + 77)
        back = buffers.zeros(4 * UNIT)
        ticket = store.start_read(extent, back)

        if not variant.verify:
            ticket.wait()
            assert back != source
            return
        with pytest.raises(ChecksumError, match=r"layers\.3\.moments: .* other bytes") as wrong:
            ticket.wait()
        assert (wrong.value.extent, wrong.value.offset) == ("layers.3.moments", 2 * UNIT)
        store.start_read(extent, back[: 2 * UNIT]).wait()  # other units are intact
        store.start_write(extent, source).wait()
        store.start_read(extent, back).wait()
        assert back == source


def _flip(store: Store, offset: int) -> None:
    """Flip one bit directly on the disk."""
    volume = store.volumes[0]
    block = offset // 4096 * 4096
    contents = bytearray(volume.read_block(block, 4096))
    contents[offset - block] ^= 4
    volume.write_block(block, bytes(contents))


def test_bytes_are_stored_unchanged(variant: StoreVariant, buffers: Buffers) -> None:
    with variant.create() as store:
        extent = store.allocate(2 * UNIT, name="plain")
        source = buffers.random(2 * UNIT)
        store.start_write(extent, source).wait()
        volume = store.volumes[0]

        assert volume.read_block(DATA_OFFSET + extent.start, 2 * UNIT) == bytes(source)
        assert _native.crc32c(source) == _native.crc32c(
            volume.read_block(DATA_OFFSET + extent.start, 2 * UNIT)
        )
