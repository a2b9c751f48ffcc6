"""One range of memory for many buffers whose lifetimes are known in advance. Room: decide."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer that is there from one operation to another, both included."""

    nbytes: int
    """How large."""

    start: int
    """The operation that needs it first."""

    end: int
    """The operation that needs it last."""

    def overlaps(self, other: Lifetime) -> bool:
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each buffer starts, and how long the range must be."""

    offsets: tuple[int, ...]
    """In the order of the lifetimes given."""

    nbytes: int
    """The whole range."""


def pack(lifetimes: Sequence[Lifetime]) -> Packing:
    """The largest first, each at the lowest offset where nothing alive is in its way.

    Not always the least possible range, but never less than what is alive at once; on schedules of
    this kind it is within a few percent of that (tests/test_packing.py).
    """
    offsets = [0] * len(lifetimes)
    longest = max((life.end - life.start for life in lifetimes), default=0)
    placed: list[tuple[int, int]] = []  # (start, which), sorted, so that few must be looked at
    nbytes = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, i)):
        life = lifetimes[i]
        first = bisect_left(placed, (life.start - longest, -1))
        until = bisect_right(placed, (life.end, len(lifetimes)))
        taken = sorted(
            (offsets[j], offsets[j] + lifetimes[j].nbytes)
            for _, j in placed[first:until]
            if lifetimes[j].overlaps(life)
        )
        offsets[i] = _lowest_gap(taken, life.nbytes)
        nbytes = max(nbytes, offsets[i] + life.nbytes)
        insort(placed, (life.start, i))
    return Packing(tuple(offsets), nbytes)


def _lowest_gap(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    at = 0
    for start, end in taken:
        if start - at >= nbytes:
            break
        at = max(at, end)
    return at


def alive_at_once(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes alive together: no packing can do with less."""
    events = [(life.start, life.nbytes) for life in lifetimes]
    events += [(life.end + 1, -life.nbytes) for life in lifetimes]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most
