"""Sampled series: thinning, gaps and statistics by phase."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.series import split_at_gaps, stats_by_phase, thin
from penstock.observe.steps import Segment


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=400), st.integers(1, 20))
def test_thinning_keeps_all_extremes_and_both_ends(values: list[int], buckets: int) -> None:
    points = [(float(t), float(v)) for t, v in enumerate(values)]

    kept = thin(points, buckets)

    assert len(kept) <= max(4 * buckets, 1)
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {max(v for _, v in kept), min(v for _, v in kept)} == {max(values), min(values)}
    assert list(kept) == sorted(kept)


def test_lines_are_interrupted_where_samples_are_missing() -> None:
    points = [(0.0, 1.0), (0.05, 1.0), (5.0, 2.0), (5.05, 2.0)]

    assert [len(stretch) for stretch in split_at_gaps(points, 0.05)] == [2, 2]


def test_a_point_on_an_edge_belongs_to_the_next_phase() -> None:
    segments = [Segment("forward", 0.0, 1.0), Segment("update", 1.0, 2.0)]
    stats = stats_by_phase([(0.5, 1.0), (1.0, 3.0), (2.0, 9.0)], segments)

    assert (stats["forward"].high, stats["update"].high) == (1.0, 3.0)
