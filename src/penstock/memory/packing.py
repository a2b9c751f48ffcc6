"""Many short-lived tensors in one range of bytes. Room: hold. Pure.

Given what each tensor needs and when it lives, find offsets such that two that live at once never
overlap, in as few bytes as can be. No packing can do with less than the most that live at once;
the problem of reaching that is NP-hard, but staging schedules are kind: a handful of sizes, rows of
equal lifetimes. A few greedy orders are tried and the best is kept, with the bound beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.units import format_bytes, round_up

ALIGNMENT = 4096
"""Where a slot starts: what O_DIRECT asks of a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A tensor that passes through the pool."""

    name: str
    nbytes: int
    start: int
    """The first moment it is there, on any clock that counts the schedule's steps."""
    end: int
    """The first moment it is not."""

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.start >= self.end:
            raise ValueError(f"{self.name}: {self.nbytes} B from {self.start} to {self.end}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where each tensor goes."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    """Bytes of each slot, padding included."""
    nbytes: int
    """What they take together."""
    peak: int
    """The most that live at once, padding included: no packing takes less."""

    @property
    def waste(self) -> float:
        """The share above the bound."""
        return self.nbytes / self.peak - 1 if self.peak else 0.0

    def __str__(self) -> str:
        return f"{len(self.offsets)} slots in {format_bytes(self.nbytes)}, {self.waste:.2%} wasted"


def pack(lifetimes: Iterable[Lifetime], *, alignment: int = ALIGNMENT) -> Packing:
    """The best of the greedy packings; stops at one that meets the bound."""
    items = list(lifetimes)
    sizes = {item.name: round_up(item.nbytes, alignment) for item in items}
    if len(sizes) < len(items):
        raise ValueError("two tensors of one name")
    peak = peak_nbytes(items, alignment=alignment)
    neighbours = _neighbours(items)
    best: dict[str, int] = {}
    best_nbytes = -1
    for order in _ORDERS:
        offsets = _place(sorted(items, key=order), sizes, neighbours)
        nbytes = max((offsets[name] + sizes[name] for name in offsets), default=0)
        if best_nbytes < 0 or nbytes < best_nbytes:
            best, best_nbytes = offsets, nbytes
        if nbytes == peak:
            break
    return Packing(offsets=best, sizes=sizes, nbytes=best_nbytes, peak=peak)


def peak_nbytes(lifetimes: Iterable[Lifetime], *, alignment: int = 1) -> int:
    """The most bytes that live at once."""
    changes: dict[int, int] = {}
    for item in lifetimes:
        nbytes = round_up(item.nbytes, alignment)
        changes[item.start] = changes.get(item.start, 0) + nbytes
        changes[item.end] = changes.get(item.end, 0) - nbytes
    live = peak = 0
    for moment in sorted(changes):
        live += changes[moment]
        peak = max(peak, live)
    return peak


# Largest first leaves small ones to fill the gaps; longest first keeps those that would split the
# range at its edge; the third is right where lifetimes nest; the last where they form a row.
_ORDERS: Sequence[Callable[[Lifetime], tuple[int, ...]]] = (
    lambda t: (-t.nbytes, t.start),
    lambda t: (t.start - t.end, -t.nbytes),
    lambda t: (-t.nbytes * (t.end - t.start), t.start),
    lambda t: (t.start, -t.nbytes),
    lambda t: (-t.end, -t.nbytes),
)


def _neighbours(items: Sequence[Lifetime]) -> dict[str, list[str]]:
    """Who lives at the same time as whom."""
    found: dict[str, list[str]] = {item.name: [] for item in items}
    living: list[Lifetime] = []
    for item in sorted(items, key=lambda t: t.start):
        living = [other for other in living if other.end > item.start]
        for other in living:
            found[item.name].append(other.name)
            found[other.name].append(item.name)
        living.append(item)
    return found


def _place(
    order: Sequence[Lifetime], sizes: Mapping[str, int], neighbours: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Each in turn into the tightest gap that its neighbours leave, else above them."""
    offsets: dict[str, int] = {}
    for item in order:
        taken = sorted(
            (offsets[name], offsets[name] + sizes[name])
            for name in neighbours[item.name]
            if name in offsets
        )
        offsets[item.name] = _tightest(taken, sizes[item.name])
    return offsets


def _tightest(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    best = best_gap = -1
    top = 0
    for low, high in taken:
        gap = low - top
        if gap >= nbytes and (best < 0 or gap < best_gap):
            best, best_gap = top, gap
        top = max(top, high)
    return top if best < 0 else best
