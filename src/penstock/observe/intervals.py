"""Sets of time intervals: when at least one of several things was happening.

A set is a sorted list of (start, end) pairs that neither overlap nor touch; none of them is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the set covered by spans that may overlap, touch, or be empty."""
    merged: list[Interval] = []
    for start, end in sorted(span for span in spans if _is_valid(span)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _is_valid(span: Interval) -> bool:
    start, end = span
    return math.isfinite(start) and math.isfinite(end) and end > start


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the intervals that are in both sets."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the intervals of the first set that are not in the second."""
    found, j = [], 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > at:
                found.append((at, right[k][0]))
            at = max(at, right[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found


def clip(spans: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of the spans between two times, as a set."""
    return union((max(a, start), min(b, end)) for a, b in spans)


def total_length(spans: Iterable[Interval]) -> float:
    """Return the seconds that a set covers."""
    return math.fsum(end - start for start, end in spans)
