"""Parse and build the header in the first block of each path of a store.

  0  magic       8   b"PENSTOCK"
  8  version     u32 1
 12  length      u32 number of bytes that the checksum covers
 16  uuid        16  of the store; the same on all its paths
 32  boot        16  the kernel's boot id
 48  pid         i64 of the owner
 56  started     u64 when the owner started, in clock ticks since boot: distinguishes it from
                     a later process with the same pid
 64  created     u64 nanoseconds since 1970
 72  capacity    u64 bytes of the store over all paths
 80  data_nbytes u64 bytes of data on this path
 88  unit        u32 bytes
 92  alignment   u32
 96  stripe      u32
100  path        u16 index of this path
102  num_paths   u16 number of paths of the store
104  turns       u16 length of the pattern
106  host        u16 length of the host's name
108  pattern     one byte per turn, then the host's name in UTF-8
...  crc32c      u32 checksum of everything before it
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from penstock import _native
from penstock.storage.errors import HeaderError
from penstock.storage.layout import MAX_ROUND, MIN_ALIGNMENT

MAGIC = b"PENSTOCK"
VERSION = 1
HEADER_NBYTES = 4096
DATA_OFFSET = 1 << 20
"""Where the data starts on every path: a multiple of all common block and erase-unit sizes."""

_FIXED = struct.Struct("<8sII16s16sqQQQQIIIHHHH")
_CRC = struct.Struct("<I")
_MAX_HOST = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The owner of a store and the layout of its bytes."""

    uuid: UUID
    boot: UUID
    pid: int
    started: int
    created_ns: int
    capacity: int
    data_nbytes: int
    unit: int
    alignment: int
    stripe_nbytes: int
    path: int
    pattern: tuple[int, ...]
    host: str

    def __post_init__(self) -> None:
        for holds, field in self._rules():
            if not holds:
                raise HeaderError("corrupt", f"invalid store header: {field}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield whether each rule holds. Later rules rely on earlier ones, so order matters."""
        turns = self.pattern
        paths = set(turns)
        known = bool(paths) and paths == set(range(len(paths)))
        yield self.pid > 0, f"pid {self.pid}"
        yield 0 < len(turns) <= MAX_ROUND and known, f"pattern {turns}"
        yield self.path in paths, f"path {self.path} of {len(paths)}"
        align, unit, stripe = self.alignment, self.unit, self.stripe_nbytes
        capacity, data = self.capacity, self.data_nbytes
        yield _is_power_of_two(align) and align >= MIN_ALIGNMENT, f"alignment {align}"
        yield _is_power_of_two(unit) and unit >= align, f"unit {unit}"
        yield stripe > 0 and stripe % unit == 0, f"stripe_nbytes {stripe}"
        yield 0 < capacity < 1 << 62 and 0 < data < 1 << 62, f"capacity {capacity}"
        yield data % align == 0, f"data_nbytes {data}"
        yield len(self.host.encode()) <= _MAX_HOST, "the host name is too long"

    @property
    def num_paths(self) -> int:
        return len(set(self.pattern))

    def to_bytes(self) -> bytes:
        """Serialize to one block, padded with zeros."""
        host = self.host.encode()
        length = _FIXED.size + len(self.pattern) + len(host)
        fixed = _FIXED.pack(
            MAGIC, VERSION, length, self.uuid.bytes, self.boot.bytes, self.pid, self.started,
            self.created_ns, self.capacity, self.data_nbytes, self.unit, self.alignment,
            self.stripe_nbytes, self.path, self.num_paths, len(self.pattern), len(host),
        )  # fmt: skip
        body = fixed + bytes(self.pattern) + host
        return (body + _CRC.pack(_native.crc32c(body))).ljust(HEADER_NBYTES, b"\0")


def parse_header(block: bytes) -> Header:
    """Parse the first block of a path.

    Raises HeaderError, whose kind is "foreign", "newer" or "corrupt", if it is not a valid header.
    """
    if block[: len(MAGIC)] != MAGIC:
        raise HeaderError("foreign", "not a Penstock store")
    if len(block) < HEADER_NBYTES:
        raise HeaderError("corrupt", f"the store header has {len(block)} of {HEADER_NBYTES} B")
    version, length = struct.unpack_from("<II", block, len(MAGIC))
    # Check the version before the checksum: a newer version may store the checksum elsewhere.
    if version > VERSION:
        raise HeaderError(
            "newer",
            f"the store has format version {version}, and this Penstock reads version {VERSION}; "
            f"upgrade Penstock",
        )
    if version == 0 or not _FIXED.size <= length <= HEADER_NBYTES - _CRC.size:
        raise HeaderError("corrupt", f"the store header has version {version} and length {length}")
    (stored_crc,) = _CRC.unpack_from(block, length)
    if stored_crc != _native.crc32c(block[:length]):
        raise HeaderError("corrupt", "the checksum of the store header does not match")
    return _parse_fields(block[:length])


def _parse_fields(body: bytes) -> Header:
    (_, _, length, uuid, boot, pid, started, created, capacity, data, unit, alignment, stripe, path,
     num_paths, turns, host) = _FIXED.unpack_from(body)  # fmt: skip
    pattern = tuple(body[_FIXED.size : _FIXED.size + turns])
    if _FIXED.size + turns + host != length or num_paths != len(set(pattern)):
        raise HeaderError("corrupt", "the lengths in the store header do not add up")
    try:
        name = body[_FIXED.size + turns :].decode()
    except UnicodeDecodeError:
        raise HeaderError("corrupt", "the host name in the store header is not UTF-8") from None
    return Header(
        uuid=UUID(bytes=uuid), boot=UUID(bytes=boot), pid=pid, started=started, created_ns=created,
        capacity=capacity, data_nbytes=data, unit=unit, alignment=alignment, stripe_nbytes=stripe,
        path=path, pattern=pattern, host=name,
    )  # fmt: skip


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
