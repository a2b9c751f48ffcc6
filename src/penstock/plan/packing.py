"""Many short-lived tensors in one range of bytes. Room: names. Pure.

Given what each tensor needs and when it lives, find offsets such that two that live at once never
overlap, in as few bytes as can be. No packing can do with less than the most that live at once;
the problem of reaching that is NP-hard, but staging schedules are kind: a handful of sizes, rows of
equal lifetimes. A few greedy orders are tried and mended, and the best is kept with the bound
beside it. The planner counts with it what the pools will take, and the pools are laid out by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.units import format_bytes, round_up

ALIGNMENT = 4096
"""Where a slot starts: what O_DIRECT asks of a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A tensor that passes through a pool."""

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


MENDINGS = 300
"""Times that orders are mended: more than any schedule tried here has needed, and under a second
for a model of a hundred layers."""


def pack(
    lifetimes: Iterable[Lifetime], *, alignment: int = ALIGNMENT, mendings: int = MENDINGS
) -> Packing:
    """The best packing found; stops at one that meets the bound.

    `mendings` is the effort: 0 tries the greedy orders and leaves them as they are. More never
    takes more bytes, and the same lifetimes always get the same packing.
    """
    items = list(lifetimes)
    sizes = {item.name: round_up(item.nbytes, alignment) for item in items}
    if len(sizes) < len(items):
        raise ValueError("two tensors of one name")
    peak = peak_nbytes(items, alignment=alignment)
    bundles = _bundle(items, sizes)
    placed = _search(bundles, peak, mendings)
    offsets: dict[str, int] = {}
    for bundle, start in zip(bundles, placed, strict=True):
        for name in bundle.names:
            offsets[name] = start
            start += sizes[name]
    nbytes = max((offsets[name] + sizes[name] for name in offsets), default=0)
    return Packing(offsets=offsets, sizes=sizes, nbytes=nbytes, peak=peak)


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


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tensors that come and go together, and so lie together: a block's matrices."""

    names: tuple[str, ...]
    nbytes: int
    start: int
    end: int


def _bundle(items: Sequence[Lifetime], sizes: Mapping[str, int]) -> list[_Bundle]:
    together: dict[tuple[int, int], list[str]] = {}
    for item in items:
        together.setdefault((item.start, item.end), []).append(item.name)
    return [
        _Bundle(tuple(names), sum(sizes[name] for name in names), start, end)
        for (start, end), names in together.items()
    ]


# The first two are right where lifetimes form a row, as a step's do; largest first leaves the small
# for the gaps; longest first keeps those that would split the range at its edge; the last is right
# where lifetimes nest.
_ORDERS: Sequence[Callable[[_Bundle], tuple[int, ...]]] = (
    lambda b: (-b.end, -b.nbytes),
    lambda b: (b.start, -b.nbytes),
    lambda b: (-b.nbytes, b.start),
    lambda b: (b.start - b.end, -b.nbytes),
    lambda b: (-b.nbytes * (b.end - b.start), b.start),
)


def _search(bundles: Sequence[_Bundle], peak: int, mendings: int) -> list[int]:
    """Each bundle's offset. From each greedy order, whoever sticks out is given an earlier turn."""
    best, best_top = _in_slots(bundles)
    if best_top <= peak:
        return best
    neighbours = _neighbours(bundles)
    for key in _ORDERS:
        order = sorted(range(len(bundles)), key=lambda i: key(bundles[i]))
        for _ in range(1 + mendings // len(_ORDERS)):
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


def _in_slots(bundles: Sequence[_Bundle]) -> tuple[list[int], int]:
    """Each in its turn into the smallest free slot that is large enough, else the largest is made
    larger; and what all slots take. Best, and soonest done, where few sizes pass in a row: pieces
    that differ by a little would each leave a gap that the next one does not fit."""
    sizes: list[int] = []
    until: list[int] = []
    slot_of = [0] * len(bundles)
    for index in sorted(range(len(bundles)), key=lambda i: (bundles[i].start, -bundles[i].nbytes)):
        bundle = bundles[index]
        free = [slot for slot, end in enumerate(until) if end <= bundle.start]
        fitting = [slot for slot in free if sizes[slot] >= bundle.nbytes]
        if fitting:
            slot = min(fitting, key=sizes.__getitem__)
        elif free:
            slot = max(free, key=sizes.__getitem__)
        else:
            slot = len(sizes)
            sizes.append(0)
            until.append(0)
        sizes[slot] = max(sizes[slot], bundle.nbytes)
        until[slot] = bundle.end
        slot_of[index] = slot
    starts = list(accumulate(sizes, initial=0))
    return [starts[slot] for slot in slot_of], starts[-1]


def _neighbours(bundles: Sequence[_Bundle]) -> list[list[int]]:
    """Who lives at the same time as whom."""
    found: list[list[int]] = [[] for _ in bundles]
    living: list[int] = []
    for index in sorted(range(len(bundles)), key=lambda i: bundles[i].start):
        living = [other for other in living if bundles[other].end > bundles[index].start]
        for other in living:
            found[index].append(other)
            found[other].append(index)
        living.append(index)
    return found


def _place(
    order: Sequence[int], bundles: Sequence[_Bundle], neighbours: Sequence[Sequence[int]]
) -> list[int]:
    """Each in turn into the lowest gap that its neighbours leave, else above them."""
    placed = [-1] * len(bundles)
    for index in order:
        taken = sorted(
            (placed[other], placed[other] + bundles[other].nbytes)
            for other in neighbours[index]
            if placed[other] >= 0
        )
        placed[index] = _lowest(taken, bundles[index].nbytes)
    return placed


def _lowest(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    top = 0
    for low, high in taken:
        if low - top >= nbytes:
            break
        top = max(top, high)
    return top
