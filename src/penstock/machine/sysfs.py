"""Read what the kernel reports under /sys and /proc.

Nothing is written, and any file may be missing. `root` is a field so that tests can present a
different machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from penstock.units import KiB

_NODES = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """Memory of one node in bytes."""

    total: int
    """Total memory."""

    free: int
    """Unused memory."""

    available: int
    """Memory that can be allocated, including what the kernel can reclaim without swapping."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory of one node that the kernel reserves, in bytes. Only sysctl and hotplug change it."""

    low: int
    """Sum of the zones' low watermarks, below which the kernel starts to reclaim."""

    unusable: int
    """Memory no process gets: high watermarks, and low zones reserved for devices."""


@dataclass(frozen=True, slots=True)
class System:
    """The kernel's files below `root`. Paths are relative to it."""

    root: Path = field(default_factory=lambda: Path("/"))

    def text(self, path: str | Path) -> str | None:
        """Return a file's text without trailing newlines, or None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").rstrip("\n")
        except OSError:
            return None

    def number(self, path: str | Path) -> int | None:
        """Return the integer in a file, or None."""
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, path: str | Path) -> tuple[str, ...]:
        """Return the sorted entries of a directory; empty if it does not exist."""
        try:
            return tuple(sorted(os.listdir(self.root / path)))
        except OSError:
            return ()

    def ids(self, path: str | Path) -> tuple[int, ...]:
        """Parse a file with a kernel list such as `0-3,8`."""
        return parse_ids(self.text(path) or "")

    # Memory nodes. A kernel without NUMA counts as one node, 0, with all CPUs and memory.

    def possible_nodes(self) -> tuple[int, ...]:
        """Return the nodes that may ever exist on this machine."""
        return self.ids(f"{_NODES}/possible") or (0,)

    def memory_nodes(self) -> tuple[int, ...]:
        """Return the nodes with online memory, with or without CPUs."""
        return self.ids(f"{_NODES}/has_memory") or (0,)

    def allowed_nodes(self) -> tuple[int, ...]:
        """Return the memory nodes that this process may use."""
        match = re.search(r"^Mems_allowed_list:\s*(\S+)", self.text("proc/self/status") or "", re.M)
        allowed = parse_ids(match[1]) if match else ()
        return tuple(n for n in self.memory_nodes() if n in allowed) or self.memory_nodes()

    def node_cpus(self, node: int) -> tuple[int, ...]:
        """Return the CPUs on a node."""
        cpus = self.text(f"{_NODES}/node{node}/cpulist")
        if cpus is None:
            return tuple(range(os.cpu_count() or 1)) if node == 0 else ()
        return parse_ids(cpus)

    def node_distances(self, node: int) -> dict[int, int]:
        """Return the relative distance from `node` to each online node; 10 is the node itself."""
        row = (self.text(f"{_NODES}/node{node}/distance") or "10").split()
        online = self.ids(f"{_NODES}/online") or (0,)
        return {other: int(value) for other, value in zip(online, row, strict=False)}

    def node_bytes(self, node: int) -> NodeBytes:
        """Return a node's memory; `available` is the kernel's MemAvailable for this node.

        It is computed as the kernel computes it for the machine: free pages minus the reserve, plus
        file cache, plus reclaimable slab. Part of the last two stays in use: from each, subtract
        the node's low watermark, or half of it if that is less. Without watermarks in
        /proc/zoneinfo, subtract half.
        """
        # For a single node, use the machine's own figures: in a virtual machine that gets its
        # memory on demand, the per-node figures lag behind.
        only = self.memory_nodes() == (node,)
        path = "proc/meminfo" if only else f"{_NODES}/node{node}/meminfo"
        found = re.findall(r"(\w+(?:\(\w+\))?):\s+(\d+) kB", self.text(path) or "")
        kib = {key: int(value) * KiB for key, value in found}
        total, free = kib.get("MemTotal", 0), kib.get("MemFree", 0)
        available = kib.get("MemAvailable")
        if available is None:
            reserve = _reserve(self, node, total)
            cache = kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0)
            slab = kib.get("KReclaimable", kib.get("SReclaimable", 0))
            reclaimable = sum(n - min(n // 2, reserve.low if reserve else n) for n in (cache, slab))
            available = max(0, free - (reserve.unusable if reserve else 0) + reclaimable)
        return NodeBytes(total=total, free=free, available=available)

    def free_huge_pages(self, node: int | None) -> int:
        """Return the number of free reserved 2 MiB pages, on one node or (None) on the machine."""
        top = "sys/kernel/mm" if node is None else f"{_NODES}/node{node}"
        return self.number(f"{top}/hugepages/hugepages-2048kB/free_hugepages") or 0

    def nearest_cpus(self, node: int) -> tuple[int, ...]:
        """Return the CPUs this process may use on `node`, or on the closest node that has any."""
        usable = set(os.sched_getaffinity(0))
        distances = self.node_distances(node)
        for other in sorted(distances, key=lambda n: (n != node, distances[n], n)):
            if cpus := tuple(c for c in self.node_cpus(other) if c in usable):
                return cpus
        return tuple(sorted(usable))


@lru_cache(maxsize=64)
def _reserve(system: System, node: int, total: int) -> Reserve | None:
    """Compute a node's reserve as calculate_totalreserve_pages() in mm/page_alloc.c does.

    Returns None if the kernel does not report watermarks. The result is cached because every tensor
    allocation checks for free memory and /proc/zoneinfo is long; `total` is part of the cache key
    because a node can grow.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    low = unusable = 0
    zones = re.split(r"^Node (\d+), zone .*$", system.text("proc/zoneinfo") or "", flags=re.M)
    for owner, zone in zip(zones[1::2], zones[2::2], strict=True):
        counts = {k: int(v) for k, v in re.findall(r"^ +(low|high|managed) +(\d+)$", zone, re.M)}
        if int(owner) == node and len(counts) == 3:
            protection = re.search(r"protection: \(([\d, ]+)\)", zone)
            protected = max(map(int, protection[1].split(","))) if protection else 0
            low += counts["low"]
            unusable += min(counts["managed"], counts["high"] + protected)
    return Reserve(low=low * page, unusable=unusable * page) if low else None


def parse_ids(text: str) -> tuple[int, ...]:
    """Parse `"0-2,5"` into `(0, 1, 2, 5)`. A malformed part ends the list."""
    ids: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            break
        first = int(match[1])
        ids.extend(range(first, int(match[2] or first) + 1))
    return tuple(ids)
