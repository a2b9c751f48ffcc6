"""Buffers whose lifetimes are known share one range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.packing import Lifetime, alive_at_once, pack

lifetimes = st.lists(
    st.builds(
        lambda nbytes, start, length: Lifetime(nbytes, start, start + length),
        st.integers(1, 100),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=25,
)


@given(lifetimes)
def test_buffers_alive_together_never_overlap(lives: list[Lifetime]) -> None:
    packing = pack(lives)

    for i, one in enumerate(lives):
        assert packing.offsets[i] + one.nbytes <= packing.nbytes
        for j in range(i):
            if one.overlaps(lives[j]):
                a, b = packing.offsets[i], packing.offsets[j]
                assert a + one.nbytes <= b or b + lives[j].nbytes <= a
    assert packing.nbytes >= alive_at_once(lives)


def test_a_large_buffer_uses_the_place_of_a_slightly_smaller_one() -> None:
    # The head is the embedding plus a norm; it must not be put on top for those few bytes.
    lives = [Lifetime(1000, 0, 9), Lifetime(400, 5, 25), Lifetime(1004, 10, 20)]

    assert pack(lives).nbytes == alive_at_once(lives) == 1404


def test_nothing_needs_nothing() -> None:
    assert pack([]).nbytes == 0
