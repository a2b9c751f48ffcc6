"""Sets of intervals, compared with counting seconds one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.intervals import clip, difference, intersection, total_length, union

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def ticks(spans: list[tuple[float, float]]) -> set[int]:
    """The same set as whole seconds, counted one by one."""
    return {t for start, end in spans for t in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_set_operations_agree_with_counting_seconds(left: list, right: list) -> None:  # type: ignore[type-arg]
    a, b = union(left), union(right)

    assert ticks(a) == ticks(left)
    assert a == sorted(a)
    assert all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1))
    assert total_length(a) == len(ticks(left))
    assert ticks(intersection(a, b)) == ticks(left) & ticks(right)
    assert ticks(difference(a, b)) == ticks(left) - ticks(right)
    assert ticks(clip(left, 5, 20)) == ticks(left) & set(range(5, 20))
