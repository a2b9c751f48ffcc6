"""The bytes on disk."""

from __future__ import annotations

from penstock import _native
from penstock.storage.header import DATA_OFFSET
from tests.conformance.store_variants import UNIT, StoreVariant
from tests.support.disks import Buffers


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
