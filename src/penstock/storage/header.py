"""The first block of a store, on every path of it. Room: hold. Pure: bytes in, bytes out.

  0  magic       8   b"PENSTOCK"
  8  version     u32 1
 12  length      u32 of what the checksum covers
 16  uuid        16  of the store; the same on all its paths
 32  boot        16  the kernel's boot id
 48  pid         i64 of the owner, and
 56  started     u64 when it started, in clock ticks since boot: a pid is used again, both are not
 64  created     u64 nanoseconds since 1970
 72  capacity    u64 bytes of the store over all paths
 80  data_nbytes u64 bytes of data on this path
 88  unit        u32 bytes
 92  alignment   u32
 96  stripe      u32
100  path        u16 which of
102  num_paths   u16
104  turns       u16 length of the pattern
106  host        u16 length of the host's name
108  pattern     one byte a turn, then the host's name in UTF-8
...  crc32c      u32 of everything before it
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
"""Where data starts on every path: a multiple of every block and erase unit worth the name."""

_FIXED = struct.Struct("<8sII16s16sqQQQQIIIHHHH")
_CRC = struct.Struct("<I")
_MAX_HOST = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Whose store this is, and how its bytes lie."""

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
        for holds, problem in self._rules():
            if not holds:
                raise HeaderError("corrupt", f"a store header that cannot be: {problem}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """One by one: a later rule divides by what an earlier one has found to be sound."""
        turns = self.pattern
        paths = set(turns)
        known = bool(paths) and paths == set(range(len(paths)))
        yield self.pid > 0, f"pid {self.pid}"
        yield 0 < len(turns) <= MAX_ROUND and known, f"pattern {turns}"
        yield self.path in paths, f"path {self.path} of {len(paths)}"
        yield _is_power(self.alignment) and self.alignment >= MIN_ALIGNMENT, "alignment"
        yield _is_power(self.unit) and self.unit >= self.alignment, "unit"
        yield self.stripe_nbytes > 0 and self.stripe_nbytes % self.unit == 0, "stripe"
        yield 0 < self.capacity < 1 << 62 and 0 < self.data_nbytes < 1 << 62, "capacity"
        yield self.data_nbytes % self.alignment == 0, "bytes of data"
        yield len(self.host.encode()) <= _MAX_HOST, "host"

    @property
    def num_paths(self) -> int:
        return len(set(self.pattern))

    def to_bytes(self) -> bytes:
        """One block, zero-padded."""
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
    """Raises HeaderError, whose kind is "foreign", "newer" or "corrupt", on anything else."""
    if block[: len(MAGIC)] != MAGIC:
        raise HeaderError("foreign", "not a Penstock store")
    if len(block) < HEADER_NBYTES:
        raise HeaderError("corrupt", f"a store header of {len(block)} B; it is {HEADER_NBYTES} B")
    version, length = struct.unpack_from("<II", block, len(MAGIC))
    # The version comes before the checksum: a newer one may put that elsewhere.
    if version > VERSION:
        raise HeaderError(
            "newer", f"a store of version {version}; this Penstock knows {VERSION}: upgrade it"
        )
    if version == 0 or not _FIXED.size <= length <= HEADER_NBYTES - _CRC.size:
        raise HeaderError("corrupt", f"a store header of version {version} and length {length}")
    (kept,) = _CRC.unpack_from(block, length)
    if kept != _native.crc32c(block[:length]):
        raise HeaderError("corrupt", "a store header whose checksum does not match")
    return _parse_fields(block[:length])


def _parse_fields(body: bytes) -> Header:
    (_, _, length, uuid, boot, pid, started, created, capacity, data, unit, alignment, stripe, path,
     num_paths, turns, host) = _FIXED.unpack_from(body)  # fmt: skip
    pattern = tuple(body[_FIXED.size : _FIXED.size + turns])
    if _FIXED.size + turns + host != length or num_paths != len(set(pattern)):
        raise HeaderError("corrupt", "a store header whose lengths do not add up")
    try:
        name = body[_FIXED.size + turns :].decode()
    except UnicodeDecodeError:
        raise HeaderError("corrupt", "a store header whose host has no name") from None
    return Header(
        uuid=UUID(bytes=uuid), boot=UUID(bytes=boot), pid=pid, started=started, created_ns=created,
        capacity=capacity, data_nbytes=data, unit=unit, alignment=alignment, stripe_nbytes=stripe,
        path=path, pattern=pattern, host=name,
    )  # fmt: skip


def _is_power(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
