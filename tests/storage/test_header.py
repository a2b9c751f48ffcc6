"""Store headers: only complete and consistent ones are accepted."""

from __future__ import annotations

import random
import struct
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.storage.errors import HeaderError
from penstock.storage.header import HEADER_NBYTES, MAGIC, Header, parse_header
from tests.support.storage_headers import check_one, header, mutate, reseal

GOOD = header().to_bytes()


def test_a_header_survives_a_round_trip() -> None:
    assert len(GOOD) == HEADER_NBYTES
    assert parse_header(GOOD) == header()


@given(
    pid=st.integers(1, 2**22),
    started=st.integers(0, 2**64 - 1),
    uuid=st.uuids(),
    capacity=st.integers(1, 2**61),
    pattern=st.sampled_from([(0,), (0, 1), (1, 0, 2), tuple(range(32))]),
    host=st.text(max_size=40),
)
def test_every_header_survives_a_round_trip(
    pid: int, started: int, uuid: UUID, capacity: int, pattern: tuple[int, ...], host: str
) -> None:
    try:
        host.encode()
    except UnicodeEncodeError:
        host = "surrogate"
    made = header(
        pid=pid, started=started, uuid=uuid, capacity=capacity, pattern=pattern, host=host
    )

    assert parse_header(made.to_bytes()) == made


def test_any_changed_byte_is_detected() -> None:
    length = struct.unpack_from("<I", GOOD, 12)[0] + 4
    for at in range(length):
        changed = bytearray(GOOD)
        changed[at] ^= 0x41
        with pytest.raises(HeaderError):
            parse_header(bytes(changed))


def test_a_newer_header_is_not_reported_as_corrupt() -> None:
    newer = bytearray(GOOD)
    struct.pack_into("<I", newer, 8, 2)

    with pytest.raises(
        HeaderError, match="version 2, and this Penstock reads version 1; upgrade"
    ) as refused:
        parse_header(bytes(newer))

    assert refused.value.kind == "newer"


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (b"", "foreign"),
        (bytes(HEADER_NBYTES), "foreign"),
        (MAGIC, "corrupt"),
        (GOOD[:4095], "corrupt"),
        (MAGIC + bytes(HEADER_NBYTES), "corrupt"),
    ],
)
def test_other_blocks_are_refused_with_the_right_kind(block: bytes, kind: str) -> None:
    with pytest.raises(HeaderError) as refused:
        parse_header(block)

    assert refused.value.kind == kind


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": 0},
        {"pattern": ()},
        {"pattern": (0, 2)},
        {"path": 2},
        {"alignment": 512},
        {"unit": 2048},
        {"stripe_nbytes": 4096},
        {"capacity": 0},
        {"data_nbytes": 100},
        {"host": "x" * 300},
    ],
)
def test_invalid_field_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HeaderError, match="invalid store header"):
        header(**wrong)


@settings(max_examples=300)
@given(st.binary(max_size=HEADER_NBYTES + 10))
@example(GOOD)
def test_any_bytes_give_a_header_or_an_error(block: bytes) -> None:
    check_one(block, GOOD)
    check_one(MAGIC + b"\1\0\0\0" + block, GOOD)


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_mutated_headers_give_a_header_or_an_error(seed: int) -> None:
    check_one(mutate(GOOD, random.Random(seed)), GOOD)


def test_the_fuzzer_reaches_the_code_behind_the_checksum() -> None:
    chance = random.Random(7)
    seen = {check_one(mutate(GOOD, chance), GOOD) for _ in range(3000)}

    assert seen >= {"foreign", "newer", "corrupt", "accepted"}


def test_resealing_makes_a_changed_header_valid() -> None:
    changed = bytearray(GOOD)
    changed[48] ^= 1  # the pid
    reseal(changed)

    assert parse_header(bytes(changed)).pid == header().pid ^ 1


def test_a_header_names_its_owner() -> None:
    parsed: Header = parse_header(GOOD)

    assert (parsed.pid, parsed.host, parsed.num_paths) == (4711, "höst", 2)
