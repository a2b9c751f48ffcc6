"""Ask the OS on which NUMA nodes pages are.

There are two ways. `move_pages` reports single pages, and `/proc/self/numa_maps` has totals per
mapping of the process. The second is faster for large ranges, but works only if the range consists
of whole mappings.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock import _native
from penstock.errors import PlacementError, PlacementPermissionError
from penstock.machine.limits import usable_threads
from penstock.machine.sysfs import System
from penstock.units import format_bytes, round_up

_MAPS = "/proc/self/maps"
_NUMA_MAPS = "/proc/self/numa_maps"

_QUERY_SECONDS = 100e-9
"""Measured time to query one page with `move_pages`."""

_WALK_SECONDS = 20e-9
"""Measured time per resident page of the process to read numa_maps, for which the OS walks all
page tables."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Number of pages on each node, as counted by the OS."""

    pages: Mapping[int, int]
    """Pages of `page_nbytes` on each node."""

    unmapped: int
    """Pages that are not in memory: never touched, or swapped out."""

    page_nbytes: int = field(default_factory=_native.page_nbytes, repr=False)

    @property
    def nbytes(self) -> dict[int, int]:
        """Bytes on each node, in whole pages."""
        return {node: count * self.page_nbytes for node, count in self.pages.items()}

    def __str__(self) -> str:
        parts = [f"node {n}: {format_bytes(b)}" for n, b in self.nbytes.items()]
        if self.unmapped:
            parts.append(f"not in memory: {format_bytes(self.unmapped * self.page_nbytes)}")
        return ", ".join(parts)


def residency(address: int, nbytes: int) -> Residency:
    """Count the pages that `[address, address + nbytes)` touches, per node."""
    page = _native.page_nbytes()
    first = address // page * page
    last = round_up(address + nbytes, page)
    counts = _read_numa_maps(first, last, page) if _walk_is_cheaper(last - first, page) else None
    if counts is None:
        counts = _query_pages(first, last - first)
    counts.pop(-1, None)  # pages that are not in memory
    total = (last - first) // page
    return Residency(pages=dict(sorted(counts.items())), unmapped=total - sum(counts.values()))


def _query_pages(address: int, nbytes: int) -> dict[int, int]:
    try:
        return _native.count_pages(address, nbytes, usable_threads(System()))
    except PermissionError as error:
        raise PlacementPermissionError("move_pages", error.errno or errno.EPERM) from None
    except OSError as error:
        raise PlacementError(f"the kernel could not report where pages are: {error}") from None


def _walk_is_cheaper(nbytes: int, page: int) -> bool:
    try:
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1])
    except OSError:
        return False
    return nbytes // page * _QUERY_SECONDS > resident * _WALK_SECONDS


def _read_numa_maps(first: int, last: int, page: int) -> dict[int, int] | None:
    """Sum the OS's totals per mapping. Return None if a mapping extends beyond the range."""
    inside = _mappings_inside(first, last)
    if inside is None:
        return None
    counts: dict[int, int] = {}
    try:
        with open(_NUMA_MAPS) as numa_maps:
            for line in numa_maps:
                if int(line[: line.index(" ")], 16) not in inside:
                    continue
                size = re.search(r"kernelpagesize_kB=(\d+)", line)
                scale = int(size[1]) * 1024 // page if size else 1
                for node, count in re.findall(r" N(\d+)=(\d+)", line):
                    counts[int(node)] = counts.get(int(node), 0) + int(count) * scale
    except OSError:
        return None
    return counts


def _mappings_inside(first: int, last: int) -> set[int] | None:
    """Return the start addresses of the range's mappings, or None if one extends beyond it."""
    starts = set()
    with open(_MAPS) as maps:
        for line in maps:
            low, high = (int(text, 16) for text in line[: line.index(" ")].split("-"))
            if high <= first or low >= last:
                continue
            if low < first or high > last:
                return None
            starts.add(low)
    return starts
