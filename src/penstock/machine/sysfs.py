"""What the kernel says of itself under /sys and /proc. Room: names.

Reads only, and every read may find nothing. `root` is an argument so that tests can show a machine
that is not here.
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
    """One node's memory. `available` counts what the kernel would reclaim without swapping."""

    total: int
    free: int
    available: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """What the kernel keeps of one node, in bytes; it changes with sysctl and hotplug only."""

    low: int
    """Below this the kernel starts to reclaim: its zones' low watermarks."""

    kept: int
    """Never given to a process: high watermarks, and low zones kept for devices that need them."""


@dataclass(frozen=True, slots=True)
class System:
    """The kernel's files below `root`."""

    root: Path = field(default_factory=lambda: Path("/"))

    def text(self, path: str | Path) -> str | None:
        """The file's text without the last newline, or None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").rstrip("\n")
        except OSError:
            return None

    def number(self, path: str | Path) -> int | None:
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, path: str | Path) -> tuple[str, ...]:
        """The entries of a directory, in order; none if it is not there."""
        try:
            return tuple(sorted(os.listdir(self.root / path)))
        except OSError:
            return ()

    def ids(self, path: str | Path) -> tuple[int, ...]:
        """A kernel list such as `0-3,8`."""
        return parse_ids(self.text(path) or "")

    # Memory nodes. A kernel without NUMA has one node, 0, holding everything.

    def possible_nodes(self) -> tuple[int, ...]:
        return self.ids(f"{_NODES}/possible") or (0,)

    def memory_nodes(self) -> tuple[int, ...]:
        """Nodes with memory in use, CPUs or not."""
        return self.ids(f"{_NODES}/has_memory") or (0,)

    def allowed_nodes(self) -> tuple[int, ...]:
        """Those of them that this process may use."""
        match = re.search(r"^Mems_allowed_list:\s*(\S+)", self.text("proc/self/status") or "", re.M)
        allowed = parse_ids(match[1]) if match else ()
        return tuple(n for n in self.memory_nodes() if n in allowed) or self.memory_nodes()

    def node_cpus(self, node: int) -> tuple[int, ...]:
        cpus = self.text(f"{_NODES}/node{node}/cpulist")
        if cpus is None:
            return tuple(range(os.cpu_count() or 1)) if node == 0 else ()
        return parse_ids(cpus)

    def node_distances(self, node: int) -> dict[int, int]:
        """Relative distance from `node` to each node with a directory; 10 is itself."""
        row = (self.text(f"{_NODES}/node{node}/distance") or "10").split()
        online = self.ids(f"{_NODES}/online") or (0,)
        return {other: int(value) for other, value in zip(online, row, strict=False)}

    def node_bytes(self, node: int) -> NodeBytes:
        """`available` is the kernel's MemAvailable, worked out for one node as the kernel does it.

        That is free pages less what is never given out, plus file cache, plus reclaimable slab;
        the last two less the node's low watermark each, or less half where that is less: so much
        stays in use. Where /proc/zoneinfo shows no watermarks it is always half.
        """
        # The only node is the machine, whose own figures are better: in a virtual machine that gets
        # its memory as it asks for it, a node's figures lag behind.
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
            given_back = sum(n - min(n // 2, reserve.low if reserve else n) for n in (cache, slab))
            available = max(0, free - (reserve.kept if reserve else 0) + given_back)
        return NodeBytes(total=total, free=free, available=available)

    def free_huge_pages(self, node: int | None) -> int:
        """Reserved 2 MiB pages that are free, on one node or (None) in all."""
        top = "sys/kernel/mm" if node is None else f"{_NODES}/node{node}"
        return self.number(f"{top}/hugepages/hugepages-2048kB/free_hugepages") or 0

    def nearest_cpus(self, node: int) -> tuple[int, ...]:
        """The CPUs of `node`, or of the node closest to it that has any; only ones we may use."""
        usable = set(os.sched_getaffinity(0))
        distances = self.node_distances(node)
        for other in sorted(distances, key=lambda n: (n != node, distances[n], n)):
            if cpus := tuple(c for c in self.node_cpus(other) if c in usable):
                return cpus
        return tuple(sorted(usable))

    def memory_limit(self) -> tuple[int, int] | None:
        """The tightest control group's (limit, bytes left), or None where there is no limit.

        Page cache is charged to the group too, but is given back under pressure: it counts as left.
        """
        tightest: tuple[int, int] | None = None
        for directory, limit_name, used_name in self._control_groups():
            limit = self.number(f"{directory}/{limit_name}")
            used = self.number(f"{directory}/{used_name}")
            if limit is None or used is None or limit >= 1 << 60:
                continue
            stat = self.text(f"{directory}/memory.stat") or ""
            # v1 counts the groups below in `total_` alone; v2 has no such line and counts them.
            cached = re.search(r"^total_inactive_file (\d+)$", stat, re.M) or re.search(
                r"^inactive_file (\d+)$", stat, re.M
            )
            left = max(0, limit - used + (int(cached[1]) if cached else 0))
            if tightest is None or left < tightest[1]:
                tightest = (limit, left)
        return tightest

    def _control_groups(self) -> list[tuple[str, str, str]]:
        """(directory, limit file, usage file) of each group from ours up to the top."""
        groups = []
        for line in (self.text("proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, files = "sys/fs/cgroup", ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                top = "sys/fs/cgroup/memory"
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            parts = [p for p in path.split("/") if p]
            for depth in range(len(parts), -1, -1):
                groups.append(("/".join([top, *parts[:depth]]), *files))
        return groups


@lru_cache(maxsize=64)
def _reserve(system: System, node: int, total: int) -> Reserve | None:
    """As calculate_totalreserve_pages() in mm/page_alloc.c; None where the kernel does not say.

    Kept, for every tensor asks for room and the file is long; `total` tells a node that has grown.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    low = kept = 0
    zones = re.split(r"^Node (\d+), zone .*$", system.text("proc/zoneinfo") or "", flags=re.M)
    for owner, zone in zip(zones[1::2], zones[2::2], strict=True):
        counts = {k: int(v) for k, v in re.findall(r"^ +(low|high|managed) +(\d+)$", zone, re.M)}
        if int(owner) == node and len(counts) == 3:
            protection = re.search(r"protection: \(([\d, ]+)\)", zone)
            spared = max(map(int, protection[1].split(","))) if protection else 0
            low += counts["low"]
            kept += min(counts["managed"], counts["high"] + spared)
    return Reserve(low=low * page, kept=kept * page) if low else None


def parse_ids(text: str) -> tuple[int, ...]:
    """`"0-2,5"` as `(0, 1, 2, 5)`; anything malformed ends the list."""
    ids: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            break
        first = int(match[1])
        ids.extend(range(first, int(match[2] or first) + 1))
    return tuple(ids)
