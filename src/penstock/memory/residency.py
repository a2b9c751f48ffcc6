"""Where pages are, asked from the kernel. Room: hold."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock import _native
from penstock.errors import PlacementError, PlacementPermissionError
from penstock.units import format_bytes, round_up

_MAPS = "/proc/self/maps"
_NUMA_MAPS = "/proc/self/numa_maps"

# Seconds a page, measured: asking for one page by system call, and letting the kernel walk its
# tables for numa_maps, which counts every page of the process.
_ASK_SECONDS = 100e-9
_WALK_SECONDS = 20e-9


@dataclass(frozen=True, slots=True)
class Residency:
    """Pages per node, as the kernel counted them."""

    pages: Mapping[int, int]
    """Pages of `page_nbytes` on each node."""

    unmapped: int
    """Pages that have no memory of their own: never touched, or swapped out."""

    page_nbytes: int = field(default_factory=_native.page_nbytes, repr=False)

    @property
    def nbytes(self) -> dict[int, int]:
        """Bytes on each node, whole pages."""
        return {node: count * self.page_nbytes for node, count in self.pages.items()}

    def __str__(self) -> str:
        parts = [f"node {n}: {format_bytes(b)}" for n, b in self.nbytes.items()]
        if self.unmapped:
            parts.append(f"not in memory: {format_bytes(self.unmapped * self.page_nbytes)}")
        return ", ".join(parts)


def residency(address: int, nbytes: int) -> Residency:
    """Count the pages that `[address, address + nbytes)` touches."""
    page = _native.page_nbytes()
    first = address // page * page
    last = round_up(address + nbytes, page)
    counts = _from_numa_maps(first, last, page) if _walk_is_cheaper(last - first, page) else None
    if counts is None:
        counts = _ask(first, last - first)
    counts.pop(-1, None)
    total = (last - first) // page
    return Residency(pages=dict(sorted(counts.items())), unmapped=total - sum(counts.values()))


def _ask(address: int, nbytes: int) -> dict[int, int]:
    try:
        return _native.count_pages(address, nbytes, os.cpu_count() or 1)
    except PermissionError as failed:
        raise PlacementPermissionError("move_pages", failed.errno or errno.EPERM) from None
    except OSError as failed:
        raise PlacementError(f"the kernel would not say where pages are: {failed}") from None


def _walk_is_cheaper(nbytes: int, page: int) -> bool:
    try:
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1])
    except OSError:
        return False
    return nbytes // page * _ASK_SECONDS > resident * _WALK_SECONDS


def _from_numa_maps(first: int, last: int, page: int) -> dict[int, int] | None:
    """Counts from the kernel's own per-mapping totals, or None where mappings straddle the ends."""
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
    """Starts of the mappings that make up the range; None if one reaches beyond it."""
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
