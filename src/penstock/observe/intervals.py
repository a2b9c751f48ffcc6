"""Stretches of time as sets: when at least one of many things went on. Room: show.

A set is a list of (start, end), sorted, apart from each other and none of them empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in any of the spans, which may overlap, touch or be empty."""
    found: list[Interval] = []
    for start, end in sorted(span for span in spans if _is_real(span)):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _is_real(span: Interval) -> bool:
    start, end = span
    return math.isfinite(start) and math.isfinite(end) and end > start


def common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The moments in both sets."""
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


def without(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The moments of the first set that are not in the second."""
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


def within(spans: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """What lies between two moments, as a set."""
    return union((max(a, start), min(b, end)) for a, b in spans)


def length(spans: Iterable[Interval]) -> float:
    """Seconds that a set covers."""
    return math.fsum(end - start for start, end in spans)
