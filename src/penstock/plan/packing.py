"""Pack short-lived buffers into one range of memory.

Each buffer has a size and a lifetime. `pack` finds offsets such that buffers that are alive at the
same time never overlap, in as few bytes as possible. The lower bound is the largest number of bytes
alive at any moment. Reaching it is NP-hard in general, but step schedules are easy instances: a
handful of sizes and long runs of equal lifetimes. So `pack` tries a few greedy orders, refines
each, and keeps the best.

The planner uses this to compute how large each pool must be, and the engine to lay the pool out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from penstock.units import format_bytes, round_up

ALIGNMENT = 4096
"""Alignment of every offset in bytes: what O_DIRECT requires of a buffer."""

REFINEMENTS = 300
"""Default number of refinements: more than any schedule tried so far needed, and less than a second
for a model of a hundred layers."""

K = TypeVar("K", bound=Hashable)
"""What identifies a buffer. The result does not depend on how keys compare, only on the order in
which lifetimes are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime(Generic[K]):
    """A buffer's size and the time during which it is needed."""

    key: K
    """What identifies the buffer."""

    nbytes: int
    """Size in bytes, without padding."""

    start: int
    """First moment at which it is needed, on any clock that counts the schedule's steps."""

    end: int
    """First moment at which it is no longer needed."""

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.start >= self.end:
            raise ValueError(
                f"{self.key}: a buffer needs at least 1 byte and an end after its start, "
                f"got {self.nbytes} B from {self.start} to {self.end}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Generic[K]):
    """An offset for each buffer."""

    offsets: Mapping[K, int]
    """Offset of each buffer, in bytes."""

    sizes: Mapping[K, int]
    """Size of each buffer in bytes, padding included."""

    nbytes: int
    """Size of the whole range in bytes."""

    peak: int
    """The most bytes alive at any moment, padding included. No packing is smaller."""

    @property
    def waste(self) -> float:
        """Bytes above the lower bound, as a fraction of it."""
        return self.nbytes / self.peak - 1 if self.peak else 0.0

    def __str__(self) -> str:
        return f"{len(self.offsets)} slots in {format_bytes(self.nbytes)}, {self.waste:.2%} wasted"


def pack(
    lifetimes: Iterable[Lifetime[K]],
    *,
    alignment: int = ALIGNMENT,
    refinements: int = REFINEMENTS,
) -> Packing[K]:
    """Find offsets for all buffers, and stop early at a packing that meets the lower bound.

    With `refinements=0` only the plain greedy orders are tried. More refinements never give a
    larger packing, and the same lifetimes always get the same packing.
    """
    items = list(lifetimes)
    sizes = {item.key: round_up(item.nbytes, alignment) for item in items}
    if len(sizes) < len(items):
        raise ValueError("two buffers have the same key")
    peak = peak_nbytes(items, alignment=alignment)
    bundles = _bundle(items, sizes)
    placed = _search(bundles, peak, refinements)
    offsets: dict[K, int] = {}
    for bundle, start in zip(bundles, placed, strict=True):
        for key in bundle.keys:
            offsets[key] = start
            start += sizes[key]
    nbytes = max((offsets[key] + sizes[key] for key in offsets), default=0)
    return Packing(offsets=offsets, sizes=sizes, nbytes=nbytes, peak=peak)


def peak_nbytes(lifetimes: Iterable[Lifetime[K]], *, alignment: int = 1) -> int:
    """Return the most bytes alive at any moment."""
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


@dataclass(frozen=True, slots=True)
class _Bundle(Generic[K]):
    """Buffers with the same lifetime, packed as one: a block's matrices, for example."""

    keys: tuple[K, ...]
    nbytes: int
    start: int
    end: int


def _bundle(items: Sequence[Lifetime[K]], sizes: Mapping[K, int]) -> list[_Bundle[K]]:
    together: dict[tuple[int, int], list[K]] = {}
    for item in items:
        together.setdefault((item.start, item.end), []).append(item.key)
    return [
        _Bundle(tuple(keys), sum(sizes[key] for key in keys), start, end)
        for (start, end), keys in together.items()
    ]


_ORDERS: Sequence[Callable[[_Bundle[Any]], tuple[int, ...]]] = (
    # By time: best for a run of lifetimes, which is what most of a step is.
    lambda b: (-b.end, -b.nbytes),
    lambda b: (b.start, -b.nbytes),
    # Largest first leaves the small buffers for the gaps.
    lambda b: (-b.nbytes, b.start),
    # Longest first keeps long-lived buffers at the edge, where they don't split the range.
    lambda b: (b.start - b.end, -b.nbytes),
    # Largest area first: best where lifetimes nest.
    lambda b: (-b.nbytes * (b.end - b.start), b.start),
)


def _search(bundles: Sequence[_Bundle[K]], peak: int, refinements: int) -> list[int]:
    """Return each bundle's offset.

    Each refinement moves the bundle that ends highest to an earlier turn in the greedy order.
    """
    best, best_top = _assign_slots(bundles)
    if best_top <= peak:
        return best
    neighbours = _neighbours(bundles)
    for key in _ORDERS:
        order = sorted(range(len(bundles)), key=lambda i: key(bundles[i]))
        for _ in range(1 + refinements // len(_ORDERS)):
            placed = _place(order, bundles, neighbours)
            ends = [at + bundle.nbytes for at, bundle in zip(placed, bundles, strict=True)]
            top = max(ends, default=0)
            if top < best_top:
                best, best_top = placed, top
            if best_top <= peak:
                return best
            highest = ends.index(top)
            turn = order.index(highest)
            order.insert(turn // 2, order.pop(turn))
    return best


def _assign_slots(bundles: Sequence[_Bundle[K]]) -> tuple[list[int], int]:
    """Assign bundles to slots in order of time, and return offsets and the total size.

    A bundle goes to the smallest free slot that is large enough; if there is none, the largest
    free slot grows. This is the best and fastest method for a run of a few sizes: with offsets
    chosen freely, pieces that differ slightly would each leave a gap too small for the next.
    """
    sizes: list[int] = []
    busy_until: list[int] = []
    slot_of = [0] * len(bundles)
    for index in sorted(range(len(bundles)), key=lambda i: (bundles[i].start, -bundles[i].nbytes)):
        bundle = bundles[index]
        free = [slot for slot, end in enumerate(busy_until) if end <= bundle.start]
        fitting = [slot for slot in free if sizes[slot] >= bundle.nbytes]
        if fitting:
            slot = min(fitting, key=sizes.__getitem__)
        elif free:
            slot = max(free, key=sizes.__getitem__)
        else:
            slot = len(sizes)
            sizes.append(0)
            busy_until.append(0)
        sizes[slot] = max(sizes[slot], bundle.nbytes)
        busy_until[slot] = bundle.end
        slot_of[index] = slot
    starts = list(accumulate(sizes, initial=0))
    return [starts[slot] for slot in slot_of], starts[-1]


def _neighbours(bundles: Sequence[_Bundle[K]]) -> list[list[int]]:
    """Return, for each bundle, the bundles that are alive at the same time."""
    neighbours: list[list[int]] = [[] for _ in bundles]
    alive: list[int] = []
    for index in sorted(range(len(bundles)), key=lambda i: bundles[i].start):
        alive = [other for other in alive if bundles[other].end > bundles[index].start]
        for other in alive:
            neighbours[index].append(other)
            neighbours[other].append(index)
        alive.append(index)
    return neighbours


def _place(
    order: Sequence[int], bundles: Sequence[_Bundle[K]], neighbours: Sequence[Sequence[int]]
) -> list[int]:
    """Place bundles one by one into the lowest gap between the neighbours placed before."""
    placed = [-1] * len(bundles)
    for index in order:
        occupied = sorted(
            (placed[other], placed[other] + bundles[other].nbytes)
            for other in neighbours[index]
            if placed[other] >= 0
        )
        placed[index] = _lowest_gap(occupied, bundles[index].nbytes)
    return placed


def _lowest_gap(occupied: Sequence[tuple[int, int]], nbytes: int) -> int:
    """Return the lowest offset with `nbytes` free; `occupied` is sorted."""
    top = 0
    for low, high in occupied:
        if low - top >= nbytes:
            break
        top = max(top, high)
    return top
