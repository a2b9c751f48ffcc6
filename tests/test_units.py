"""Parsing and formatting of sizes, rates and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.units import (
    GiB,
    KiB,
    MiB,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_memory,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", KiB),
        ("64GiB", 64 * GiB),
        (" 64 gib ", 64 * GiB),
        ("1.5MiB", 3 * MiB // 2),
        (".5KiB", 512),
        ("2GB", 2 * 10**9),
        ("1TB", 10**12),
        (7, 7),
    ],
)
def test_parse_bytes_reads_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["5", " 64 ", "65536", "1048575"])
def test_a_small_amount_of_memory_needs_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match=rf"{text}' has no unit; write {text.strip()}GiB, or"):
        parse_memory(text)


def test_an_amount_of_memory_in_bytes_is_large_or_says_so() -> None:
    assert [parse_memory(text) for text in ("0", "5B", "5GiB", "8589934592", 5)] == [
        0, 5, 5 * GiB, 8 * GiB, 5,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 G", "1,5GiB", "1e9", "nan", "0x10", "1 2"])
def test_parse_bytes_quotes_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [None, 1.5, True, [1]])
def test_parse_bytes_accepts_only_strings_and_integers(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(value)  # type: ignore[arg-type]


@given(st.integers(0, 2**60))
def test_large_sizes_are_exact(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == nbytes
    assert parse_bytes(f"{nbytes}KiB") == nbytes * KiB


@given(st.integers(0, 2**60))
def test_a_formatted_size_parses_back_within_three_digits(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006, abs=0.5)


def test_formatting_uses_three_digits_and_a_unit() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536 * MiB) == "1.50 GiB"
    assert format_bytes(MiB - 1) == "1024 KiB"
    assert format_rate(55.3e9) == "55.3 GB/s"
    assert format_rate(12) == "12 B/s"
    assert format_seconds(84.1e-9) == "84.1 ns"
    assert format_seconds(1.2e-3) == "1.20 ms"


@given(st.integers(0, 2**50), st.integers(1, 2**30))
def test_round_up_returns_the_smallest_multiple(value: int, unit: int) -> None:
    rounded = round_up(value, unit)

    assert rounded % unit == 0
    assert value <= rounded < value + unit
