"""Change single bits of a store directly on its disks, behind the store's back."""

from __future__ import annotations

import random

from penstock.storage.header import DATA_OFFSET
from penstock.storage.layout import Extent
from penstock.storage.store import Store
from penstock.storage.volume import Volume

BLOCK = 4096


def locate(store: Store, extent: Extent, offset: int) -> tuple[Volume, int]:
    """Return the path that holds a byte of an extent, and the byte's offset there."""
    piece = store._files.layout.pieces(extent, offset, 1)[0]
    return store.volumes[piece.path], DATA_OFFSET + piece.offset


def flip_bit(store: Store, extent: Extent, offset: int, bit: int = 2) -> tuple[str, int]:
    """Flip a bit on the disk. Return the path and offset that an error must name.

    That is the offset of the unit: there is one checksum per unit.
    """
    volume, at = locate(store, extent, offset)
    start = at // BLOCK * BLOCK
    block = bytearray(volume.read_block(start, BLOCK))
    block[at - start] ^= 1 << bit
    volume.write_block(start, bytes(block))
    return volume.data_path, at - offset % store.unit


def flip_any_bit(store: Store, extent: Extent, draw: random.Random) -> tuple[str, int]:
    """Flip a random bit of the bytes that an extent was allocated for."""
    return flip_bit(store, extent, draw.randrange(extent.nbytes), draw.randrange(8))
