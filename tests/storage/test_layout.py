"""Layouts: every byte has one place, and every path gets its share."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.layout import MAX_ROUND, Extent, Layout, make_pattern
from penstock.units import KiB, MiB

UNIT = 64 * KiB


def test_an_extent_on_one_path_is_one_piece() -> None:
    layout = Layout(pattern=(0,))
    extent = Extent("whole", 10 * MiB, 10 * MiB, 3 * MiB)

    (piece,) = layout.pieces(extent, 0, 10 * MiB)

    assert (piece.path, piece.offset, piece.nbytes) == (0, 3 * MiB, 10 * MiB)


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    start=st.integers(0, 200),
    offset=st.integers(0, 50),
    units=st.integers(1, 300),
)
def test_every_byte_has_one_place(
    weights: list[float], start: int, offset: int, units: int
) -> None:
    layout = Layout(pattern=make_pattern(weights), stripe_nbytes=4 * UNIT)
    extent = Extent("e", (offset + units) * UNIT, (offset + units) * UNIT, start * UNIT)

    pieces = layout.pieces(extent, offset * UNIT, units * UNIT)

    # Pieces are contiguous in the buffer and in the extent, and do not overlap on disk.
    into = 0
    for piece in pieces:
        assert (piece.into, piece.place) == (into, offset * UNIT + into)
        assert piece.offset % UNIT == 0
        into += piece.nbytes
    assert into == units * UNIT
    places = sorted((p.path, p.offset, p.offset + p.nbytes) for p in pieces)
    for (path, _, end), (next_path, begin, _) in pairwise(places):
        assert path != next_path or begin >= end


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), rounds=st.integers(1, 4))
def test_a_store_fits_what_its_paths_reserve(weights: list[float], rounds: int) -> None:
    layout = Layout(pattern=make_pattern(weights), stripe_nbytes=4 * UNIT)
    capacity = layout.round_nbytes * rounds - 5
    reserved = layout.path_nbytes(capacity)

    stored = capacity // 4096 * 4096
    for piece in layout.pieces(Extent("all", stored, stored, 0), 0, stored):
        assert piece.offset + piece.nbytes <= reserved[piece.path]


def test_the_place_of_a_byte_does_not_depend_on_the_transfer() -> None:
    layout = Layout(pattern=(0, 1, 0), stripe_nbytes=2 * UNIT)
    extent = Extent("e", 40 * UNIT, 40 * UNIT, 7 * UNIT)
    whole = {
        p.place + i: (p.path, p.offset + i)
        for p in layout.pieces(extent, 0, 40 * UNIT)
        for i in range(0, p.nbytes, UNIT)
    }
    for unit in range(40):
        (piece,) = layout.pieces(extent, unit * UNIT, UNIT)
        assert (piece.path, piece.offset) == whole[unit * UNIT]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1], [1]),
        ([3, 3], [1, 1]),
        ([2, 1], [2, 1]),
        ([7, 5], [7, 5]),
        ([1, 1, 2], [1, 1, 2]),
        ([MAX_ROUND - 1, 1], [MAX_ROUND - 1, 1]),
    ],
)
def test_turns_are_in_proportion_to_the_weights(weights: list[float], counts: list[int]) -> None:
    pattern = make_pattern(weights)

    assert [pattern.count(path) for path in range(len(weights))] == counts


@given(st.lists(st.floats(1, 4), min_size=1, max_size=4))
def test_no_path_waits_long_for_another(weights: list[float]) -> None:
    pattern = make_pattern(weights)
    rates = [w / sum(weights) for w in weights]

    slowest = max(pattern.count(path) / rate for path, rate in enumerate(rates))
    assert len(pattern) <= MAX_ROUND
    assert slowest / len(pattern) < 1.10  # of what it would take if all finished at once


def test_turns_are_spread_evenly() -> None:
    assert make_pattern([1, 1]) == (0, 1)
    assert make_pattern([3, 1]).index(1) in (1, 2)


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [float("nan")], [1] * 33])
def test_invalid_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive weights"):
        make_pattern(weights)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pattern": ()},
        {"pattern": (0, 2)},
        {"pattern": (0,), "alignment": 512},
        {"pattern": (0,), "unit": 100},
        {"pattern": (0,), "stripe_nbytes": UNIT + 1},
    ],
)
def test_invalid_layouts_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        Layout(**wrong)  # type: ignore[arg-type]
