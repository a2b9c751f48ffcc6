"""The extents of a store that was kept, between its header and its data. Room: hold. Pure.

Magic, length and CRC-32C, then JSON: `[[name, nbytes, start], ...]`. Written when a store is closed
with keep=True; a store of a killed run has none, and its extents are nobody's any more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

from penstock import _native
from penstock.storage.errors import HeaderError, StoreFullError
from penstock.storage.header import DATA_OFFSET
from penstock.storage.layout import Extent, Layout
from penstock.units import KiB, round_up

TABLE_OFFSET = 64 * KiB
"""Its own block on every device there is."""
TABLE_NBYTES = DATA_OFFSET - TABLE_OFFSET

_MAGIC = b"PENSEXTS"
_FIXED = struct.Struct("<8sII")


def table_to_bytes(extents: Iterable[Extent]) -> bytes:
    body = json.dumps([[e.name, e.nbytes, e.start] for e in extents]).encode()
    if _FIXED.size + len(body) > TABLE_NBYTES:
        raise StoreFullError(
            name="the table of extents", wanted=len(body), free=TABLE_NBYTES, capacity=TABLE_NBYTES
        )
    return _FIXED.pack(_MAGIC, len(body), _native.crc32c(body)) + body


def parse_table(block: bytes, layout: Layout, capacity: int) -> list[Extent]:
    """The extents, or none where no table was written. Raises HeaderError on a damaged one."""
    if block[: len(_MAGIC)] != _MAGIC:
        return []
    if len(block) < _FIXED.size:
        raise HeaderError("corrupt", "a table of extents that is cut off")
    _, length, kept = _FIXED.unpack_from(block)
    body = block[_FIXED.size : _FIXED.size + length]
    if len(body) != length or kept != _native.crc32c(body):
        raise HeaderError("corrupt", "a table of extents whose checksum does not match")
    try:
        rows = json.loads(body)
        return [_extent(row, layout, capacity) for row in rows]
    except (ValueError, TypeError, RecursionError) as failed:
        raise HeaderError("corrupt", f"a table of extents that cannot be: {failed}") from None


def _extent(row: object, layout: Layout, capacity: int) -> Extent:
    match row:
        case [str(name), int(nbytes), int(start)]:
            stored = round_up(nbytes, layout.alignment)
            inside = nbytes > 0 and 0 <= start <= round_up(capacity, layout.alignment) - stored
            if inside and start % layout.alignment == 0:
                return Extent(name, nbytes, stored, start)
    raise ValueError(f"extent {str(row)[:80]}")
