"""Store headers for tests, and the header fuzzer that `make test` and `make fuzz` share."""

from __future__ import annotations

import random
import struct
from uuid import UUID

from penstock import _native
from penstock.storage.errors import HeaderError
from penstock.storage.header import HEADER_NBYTES, Header, parse_header
from penstock.storage.layout import Layout
from penstock.units import KiB, MiB

KINDS = {kind: kind for kind in ("foreign", "newer", "corrupt")}
"""Looking up any other kind of refusal raises KeyError, which fails the test."""


def header(**changes: object) -> Header:
    fields: dict[str, object] = {
        "uuid": UUID(int=1),
        "boot": UUID(int=2),
        "pid": 4711,
        "started": 12345,
        "created_ns": 10**18,
        "capacity": 64 * MiB,
        "data_nbytes": 64 * MiB,
        "unit": 64 * KiB,
        "alignment": 4096,
        "stripe_nbytes": 2 * MiB,
        "path": 0,
        "pattern": (0, 1, 0),
        "host": "höst",
    }
    return Header(**{**fields, **changes})  # type: ignore[arg-type]


def mutate(block: bytes, chance: random.Random) -> bytes:
    """Change or truncate a header at random.

    Half of the time the checksum is recomputed, so that the checks behind it are reached as well.
    """
    mutated = bytearray(block)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(160) if chance.random() < 0.9 else chance.randrange(len(mutated))
        at = min(at, len(mutated) - 1)
        mutated[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    if chance.random() < 0.1:
        start = chance.randrange(150)
        mutated[start : start + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, chance.randbytes(8)))
    if chance.random() < 0.5:
        reseal(mutated)
    if chance.random() < 0.05:
        del mutated[chance.randrange(len(mutated)) :]
    return bytes(mutated)


def reseal(block: bytearray) -> None:
    """Recompute the checksum, if the length field leaves room for one."""
    (length,) = struct.unpack_from("<I", block, 12)
    if length <= len(block) - 4:
        struct.pack_into("<I", block, length, _native.crc32c(bytes(block[:length])))


def check_one(block: bytes, original: bytes) -> str:
    """Parse any bytes and check that a Header or a HeaderError results. Return the outcome."""
    try:
        parsed = parse_header(block)
    except HeaderError as refused:
        return KINDS[refused.kind]
    # An accepted header must serialize to the bytes that it was parsed from.
    length = struct.unpack_from("<I", block, 12)[0] + 4
    assert parsed.to_bytes()[:length] == block[:length]
    assert len(block) >= HEADER_NBYTES
    Layout(
        pattern=parsed.pattern,
        alignment=parsed.alignment,
        unit=parsed.unit,
        stripe_nbytes=parsed.stripe_nbytes,
    )
    return "same" if block[:length] == original[:length] else "accepted"
