"""How long pieces of memory are in use, and the peak of many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

NEVER = 1 << 62
"""End of memory that stays in use."""


class Lifetime(NamedTuple):
    """Memory that is in use from one point in time to another."""

    key: Hashable
    nbytes: int
    start: int
    end: int
    """The first point in time at which the memory is free again."""


class Request(NamedTuple):
    """One call of an allocator."""

    key: Hashable
    nbytes: int | None
    """Bytes to allocate; None to free what was allocated under the key."""


def peak_nbytes(lifetimes: Sequence[Lifetime]) -> int:
    """Return the most bytes in use at any time."""
    changes: Counter[int] = Counter()
    for lifetime in lifetimes:
        changes[lifetime.start] += lifetime.nbytes
        changes[lifetime.end] -= lifetime.nbytes
    live = peak = 0
    for time in sorted(changes):
        live += changes[time]
        peak = max(peak, live)
    return peak


def in_order(lifetimes: Sequence[Lifetime]) -> Iterator[Request]:
    """Yield the calls of an allocator in the order of time, frees before allocations."""
    events = [(each.start, 1, each) for each in lifetimes if each.nbytes]
    events += [(each.end, 0, each) for each in lifetimes if each.nbytes and each.end < NEVER]
    for _, starts, each in sorted(events, key=lambda event: event[:2]):
        yield Request(each.key, each.nbytes if starts else None)
