"""Map the bytes of an extent to offsets on a store's paths. Pure arithmetic, no I/O.

A store is one range of bytes, split into stripes that are distributed over its paths. `pattern`
says which path each stripe of a round belongs to, in proportion to the paths' bandwidth. The
stripes of a path are contiguous on that path. A transfer of one round or more therefore keeps every
path busy in proportion to its speed, with long sequential requests.

An extent starts on a whole unit. A unit is the smallest part that can be transferred alone, and it
has its own checksum. Stripes are whole units too, so a unit never spans two paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.storage.errors import AlignmentError
from penstock.units import KiB, MiB, round_up

MIN_ALIGNMENT = 4096
"""Smallest alignment of a layout, in bytes."""

MAX_ROUND = 32
"""Maximum number of stripes in a round. It makes bandwidth shares exact to about 3 %."""


class ExtentPiece(NamedTuple):
    """A run of bytes that is contiguous on its path, in the buffer and in the extent."""

    path: int
    """Index of the path."""
    offset: int
    """Offset in the path's data area."""
    into: int
    """Offset in the buffer."""
    nbytes: int
    place: int
    """Offset in the extent."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A named range of a store's bytes."""

    name: str
    nbytes: int
    """Size as requested."""
    stored_nbytes: int
    """Size on disk, padded to whole blocks. A whole read or write has this length."""
    start: int
    """Offset in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The distribution of a store's bytes over its paths."""

    pattern: tuple[int, ...]
    """Path of each stripe in a round."""
    alignment: int = MIN_ALIGNMENT
    """Extents start and end at multiples of this: the largest block size of any path's device, and
    at least 4 KiB."""
    unit: int = 64 * KiB
    """Offsets within an extent are multiples of this."""
    stripe_nbytes: int = 2 * MiB
    """Size of a stripe."""

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) != set(range(max(self.pattern) + 1)):
            raise ValueError(f"a pattern must name every path from 0 on, got {self.pattern}")
        if self.alignment < MIN_ALIGNMENT or self.alignment & (self.alignment - 1):
            raise ValueError(
                f"alignment must be a power of two of at least 4096, got {self.alignment}"
            )
        if self.unit < self.alignment or self.unit & (self.unit - 1):
            raise ValueError(
                f"unit must be a power of two of at least {self.alignment}, got {self.unit}"
            )
        if self.stripe_nbytes < 1 or self.stripe_nbytes % self.unit:
            raise ValueError(
                f"stripe_nbytes must be a multiple of {self.unit}, got {self.stripe_nbytes}"
            )

    @property
    def num_paths(self) -> int:
        return max(self.pattern) + 1

    @property
    def round_nbytes(self) -> int:
        """Size of one round of stripes."""
        return len(self.pattern) * self.stripe_nbytes

    def next_start(self, used: int) -> int:
        """Return where the next extent may start when `used` bytes of the store are allocated."""
        return round_up(used, self.alignment if self.num_paths == 1 else self.unit)

    def path_nbytes(self, capacity: int) -> tuple[int, ...]:
        """Return how many bytes each path must hold for a store of `capacity`."""
        if self.num_paths == 1:
            return (round_up(capacity, self.alignment),)
        rounds = -(-capacity // self.round_nbytes)
        return tuple(
            rounds * self.pattern.count(path) * self.stripe_nbytes for path in range(self.num_paths)
        )

    def pieces(self, extent: Extent, offset: int, nbytes: int) -> list[ExtentPiece]:
        """Return the contiguous runs that make up `[offset, offset + nbytes)` of the extent."""
        if self.num_paths == 1:
            return [ExtentPiece(0, extent.start + offset, 0, nbytes, offset)]
        return list(self._striped_pieces(extent.start + offset, nbytes, offset))

    def _striped_pieces(self, start: int, nbytes: int, place: int) -> Iterator[ExtentPiece]:
        into = 0
        while into < nbytes:
            stripe, within = divmod(start + into, self.stripe_nbytes)
            run = min(self.stripe_nbytes - within, nbytes - into)
            path, stripe_start = self._locate_stripe(stripe)
            yield ExtentPiece(path, stripe_start + within, into, run, place + into)
            into += run

    def _locate_stripe(self, stripe: int) -> tuple[int, int]:
        """Return the path of a stripe and the stripe's offset on that path."""
        rounds, turn = divmod(stripe, len(self.pattern))
        path = self.pattern[turn]
        before = rounds * self.pattern.count(path) + self.pattern[:turn].count(path)
        return path, before * self.stripe_nbytes


def make_pattern(weights: Sequence[float]) -> tuple[int, ...]:
    """Build a round in proportion to `weights`, with each path's turns spread evenly.

    Every path gets at least one turn. A path that is too slow for that slows the others down, and
    is better left out.
    """
    if not weights or len(weights) > MAX_ROUND or any(not w > 0 for w in weights):
        raise ValueError(
            f"expected 1 to {MAX_ROUND} positive weights, one per path, got {list(weights)}"
        )
    counts = min(
        (c for n in range(1, MAX_ROUND + 1) if sum(c := _turn_counts(weights, n)) <= MAX_ROUND),
        key=lambda counts: (round(_imbalance(counts, weights), 3), sum(counts)),
    )
    # The path that is furthest behind its share takes the next turn.
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


def check_transfer(
    layout: Layout, extent: Extent, *, address: int, buffer_nbytes: int, offset: int, length: int
) -> None:
    """Raise AlignmentError unless `length` bytes at `address` can move to or from `offset`.

    The store never copies through a bounce buffer to repair an alignment: that buffer would be
    memory the plan does not know about.
    """
    name, align, unit = extent.name, layout.alignment, layout.unit
    if address % align:
        raise AlignmentError(
            f"{name}: the buffer starts {address % align} B after a multiple of {align}; allocate "
            f"it with arena.take(..., align={align})"
        )
    if length > buffer_nbytes:
        raise AlignmentError(
            f"{name}: {length} B do not fit in the buffer, which has {buffer_nbytes} B"
        )
    if offset < 0 or offset % unit:
        raise AlignmentError(f"{name}: offset {offset} is not a multiple of the unit, {unit}")
    end = offset + length
    if length < 1 or end > extent.stored_nbytes:
        raise AlignmentError(
            f"{name}: bytes {offset} to {end} are outside the extent, which has "
            f"{extent.stored_nbytes} B (padding included)"
        )
    if length % unit and end != extent.stored_nbytes:
        raise AlignmentError(
            f"{name}: a length of {length} B is neither a multiple of the unit, {unit}, nor does "
            f"it reach the end of the extent at {extent.stored_nbytes}; use a buffer of "
            f"extent.stored_nbytes to transfer a whole extent"
        )


def _turn_counts(weights: Sequence[float], turns: int) -> list[int]:
    return [max(1, round(w * turns / sum(weights))) for w in weights]


def _imbalance(counts: Sequence[int], weights: Sequence[float]) -> float:
    """Return how much longer a round takes than if all paths finished at the same time."""
    slowest = max(count / weight for count, weight in zip(counts, weights, strict=True))
    return slowest * sum(weights) / sum(counts) - 1
