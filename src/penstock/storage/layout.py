"""Where the bytes of an extent lie. Room: hold. Pure: no files, no I/O.

A store is one range of bytes, dealt to its paths in stripes: `pattern` says which path each stripe
of a round belongs to, in proportion to the paths' bandwidth, and a path's stripes lie one after
the other on it. So any transfer of a round or more keeps every path busy in proportion, and every
request is one contiguous run.

An extent starts on a whole unit, the smallest part that can be read or written alone and that has
a checksum of its own; stripes are whole units too, so no unit is ever cut by a path's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.storage.errors import AlignmentError
from penstock.units import KiB, MiB, round_up

MIN_ALIGNMENT = 4096
MAX_ROUND = 32
"""Stripes in a round at most: shares are exact to about 3 %."""


class ExtentPiece(NamedTuple):
    """A run that is contiguous on its path, in the buffer and in the extent."""

    path: int
    offset: int
    """In the path's data area."""
    into: int
    """In the buffer."""
    nbytes: int
    place: int
    """In the extent."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A named run of a store's bytes."""

    name: str
    nbytes: int
    """As asked for."""
    stored_nbytes: int
    """As it lies on disk, padded to whole blocks: the length of a whole read or write."""
    start: int
    """In the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a store's bytes are dealt."""

    pattern: tuple[int, ...]
    """The path of each stripe in a round."""
    alignment: int = MIN_ALIGNMENT
    """Extents start and end on this: the largest block of any path's device, 4 KiB at least."""
    unit: int = 64 * KiB
    """Offsets within an extent are multiples of this."""
    stripe_nbytes: int = 2 * MiB

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) != set(range(max(self.pattern) + 1)):
            raise ValueError(f"a pattern names every path from 0 on, got {self.pattern}")
        if self.alignment < MIN_ALIGNMENT or self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment is a power of two from 4096 on, got {self.alignment}")
        if self.unit < self.alignment or self.unit & (self.unit - 1):
            raise ValueError(f"a unit is a power of two from {self.alignment} on, got {self.unit}")
        if self.stripe_nbytes < 1 or self.stripe_nbytes % self.unit:
            raise ValueError(f"a stripe is a multiple of {self.unit}, got {self.stripe_nbytes}")

    @property
    def num_paths(self) -> int:
        return max(self.pattern) + 1

    @property
    def round_nbytes(self) -> int:
        return len(self.pattern) * self.stripe_nbytes

    def next_start(self, used: int) -> int:
        """Where an extent may start when `used` bytes of the store are taken."""
        return round_up(used, self.alignment if self.num_paths == 1 else self.unit)

    def path_nbytes(self, capacity: int) -> tuple[int, ...]:
        """What each path must hold for a store of `capacity`."""
        if self.num_paths == 1:
            return (round_up(capacity, self.alignment),)
        rounds = -(-capacity // self.round_nbytes)
        return tuple(
            rounds * self.pattern.count(path) * self.stripe_nbytes for path in range(self.num_paths)
        )

    def pieces(self, extent: Extent, offset: int, nbytes: int) -> list[ExtentPiece]:
        """The runs that `[offset, offset + nbytes)` of the extent is made of."""
        if self.num_paths == 1:
            return [ExtentPiece(0, extent.start + offset, 0, nbytes, offset)]
        return list(self._striped(extent.start + offset, nbytes, offset))

    def _striped(self, start: int, nbytes: int, place: int) -> Iterator[ExtentPiece]:
        into = 0
        while into < nbytes:
            stripe, within = divmod(start + into, self.stripe_nbytes)
            run = min(self.stripe_nbytes - within, nbytes - into)
            path, on_path = self._on_path(stripe)
            yield ExtentPiece(path, on_path + within, into, run, place + into)
            into += run

    def _on_path(self, stripe: int) -> tuple[int, int]:
        """The path of a stripe of the store, and where on it the stripe starts."""
        done, turn = divmod(stripe, len(self.pattern))
        path = self.pattern[turn]
        before = done * self.pattern.count(path) + self.pattern[:turn].count(path)
        return path, before * self.stripe_nbytes


def make_pattern(weights: Sequence[float]) -> tuple[int, ...]:
    """A round in proportion to `weights`, each path's turns spread evenly.

    Every path gets at least one turn: one too slow for that would only hold the others up, and is
    better left out.
    """
    if not weights or len(weights) > MAX_ROUND or any(not w > 0 for w in weights):
        raise ValueError(f"1 to {MAX_ROUND} positive weights, one per path, got {list(weights)}")
    counts = min(
        (c for n in range(1, MAX_ROUND + 1) if sum(c := _shares(weights, n)) <= MAX_ROUND),
        key=lambda counts: (round(_error(counts, weights), 3), sum(counts)),
    )
    # Whoever is furthest behind its share goes next.
    turns = [0] * len(counts)
    pattern = []
    for step in range(1, sum(counts) + 1):
        behind = [
            count * step / sum(counts) - turn for count, turn in zip(counts, turns, strict=True)
        ]
        path = behind.index(max(behind))
        turns[path] += 1
        pattern.append(path)
    return tuple(pattern)


def _shares(weights: Sequence[float], turns: int) -> list[int]:
    return [max(1, round(w * turns / sum(weights))) for w in weights]


def _error(counts: Sequence[int], weights: Sequence[float]) -> float:
    """The time of a round over the time it would take if every path finished at once."""
    slowest = max(count / weight for count, weight in zip(counts, weights, strict=True))
    return slowest * sum(weights) / sum(counts) - 1


# --------
# Whether a buffer and a part of an extent fit each other. Room: hold. Pure.


def check_span(
    layout: Layout, extent: Extent, *, address: int, held: int, offset: int, length: int
) -> None:
    """Raise unless `length` bytes at `address` can move to or from `offset` as they are.

    Nothing is copied to make it fit: a hidden buffer would be memory that no plan knows of.
    """
    name, align, unit = extent.name, layout.alignment, layout.unit
    if address % align:
        raise AlignmentError(
            f"{name}: the buffer starts {address % align} B after a multiple of {align}; take it "
            f"with arena.take(..., align={align})"
        )
    if length > held:
        raise AlignmentError(f"{name}: {length} B wanted of a buffer of {held} B")
    if offset < 0 or offset % unit:
        raise AlignmentError(f"{name}: offset {offset} is not a multiple of the unit, {unit}")
    end = offset + length
    if length < 1 or end > extent.stored_nbytes:
        raise AlignmentError(
            f"{name}: bytes {offset} to {end} of an extent of {extent.stored_nbytes} "
            f"(padding included)"
        )
    if length % unit and end != extent.stored_nbytes:
        raise AlignmentError(
            f"{name}: a length of {length} B is neither a multiple of the unit, {unit}, nor does "
            f"it reach the extent's end at {extent.stored_nbytes}; a whole extent needs a buffer "
            f"of extent.stored_nbytes"
        )
