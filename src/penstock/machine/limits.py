"""Find out how much memory and how many CPUs this process may use.

A machine may have more than a process gets: control groups (containers, batch systems, systemd) and
resource limits (`ulimit`) bound it. Every question about free host memory is answered here, so
that a budget, a check before an allocation and `penstock doctor` agree.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from penstock.errors import MemoryLimitError
from penstock.machine.machine import MemoryLimit
from penstock.machine.sysfs import System
from penstock.units import KiB, MiB

_UNLIMITED = 1 << 60
"""cgroup v1 reports a number near 2^63 if there is no limit."""

_DEFAULT_MOUNTS = {
    "": "/sys/fs/cgroup",
    "memory": "/sys/fs/cgroup/memory",
    "cpu": "/sys/fs/cgroup/cpu",
}
"""Where the hierarchies are if /proc/self/mountinfo does not say; "" is cgroup v2."""

_RESOURCE_LIMITS = (
    ("Max address space", "VmSize", "ulimit -v"),
    ("Max data size", "VmData", "ulimit -d"),
)
"""Resource limits on memory: name in /proc/self/limits, what they limit in /proc/self/status, and
how a shell sets them. A limit on locked memory does not bound a budget: what cannot be locked is
pageable."""

IMPORTS = 280 * MiB
"""Memory of a process that has loaded PyTorch's CPU build and transformers, as a control group
counts it: the code of libraries is page cache, and not part of it. Measured: 250 to 280 MiB."""

Controller = Literal["memory", "cpu"]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that this process may use, in bytes."""

    total: int
    """What the process may use at most."""

    free: int
    """What it may still allocate."""

    limit: MemoryLimit | None
    """The limit that leaves the least; None if the process has none."""


def host_memory(system: System) -> HostMemory:
    """Return the host memory that this process may use: that of its nodes, and within its limits.

    Limits apply to the sum over all nodes.
    """
    nodes = [system.node_bytes(node) for node in system.allowed_nodes()]
    total, free = sum(node.total for node in nodes), sum(node.available for node in nodes)
    limit = memory_limit(system)
    if limit is not None:
        total, free = min(total, limit.nbytes), min(free, limit.left)
    return HostMemory(total=total, free=free, limit=limit)


def memory_limit(system: System) -> MemoryLimit | None:
    """Return the limit that leaves this process the least memory; None without a limit."""
    limits = [*_group_limits(system), *_resource_limits(system)]
    return min(limits, key=lambda limit: (limit.left, limit.nbytes), default=None)


def check_import_memory(system: System) -> None:
    """Raise MemoryLimitError if the limit is too low to load PyTorch, before that is tried."""
    limit = memory_limit(system)
    if limit is not None and limit.name.startswith("/") and limit.left < IMPORTS:
        raise MemoryLimitError(
            wanted=IMPORTS, free=limit.left, limit=limit.nbytes, name=limit.name,
            what="needed to load PyTorch and transformers",
        )  # fmt: skip


def memory_limit_for_process(system: System) -> MemoryLimit | None:
    """Return the limit with the memory of this process counted as left.

    A budget leaves room for the whole process. So what the process holds already, which depends on
    the modules that it has imported by now, must not count twice.
    """
    limit = memory_limit(system)
    if limit is None or not limit.name.startswith("/"):
        return limit
    own = _status_nbytes(system, "RssAnon")
    return replace(limit, left=min(limit.nbytes, limit.left + own))


def usable_threads(system: System, cpus: int | None = None) -> int:
    """Return how many threads can run concurrently: one per CPU, at most the CPU quota.

    `cpus` is the number of CPUs to use; by default, all that this process may run on.
    """
    cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
    quota = cpu_quota(system)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def cpu_quota(system: System) -> float | None:
    """Return how many CPUs' time the tightest control group grants; None without a quota."""
    quotas = []
    for directory in _groups(system, "cpu"):
        text = system.text(f"{directory}/cpu.max")
        if text is None:  # cgroup v1
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            text = " ".join(system.text(f"{directory}/{name}") or "" for name in names)
        # Without a quota the first number is "max" in v2 and -1 in v1.
        if (match := re.fullmatch(r"(\d+) (\d+)", text)) and int(match[2]):
            quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def _group_limits(system: System) -> Iterator[MemoryLimit]:
    """Yield the limits of our control group and of every group above it that can be seen."""
    for directory in _groups(system, "memory"):
        used = system.number(f"{directory}/memory.current")
        # Above memory.high the kernel slows the process down until it stands still.
        files = {
            name: system.number(f"{directory}/{name}") for name in ("memory.max", "memory.high")
        }
        stat = system.text(f"{directory}/memory.stat") or ""
        if used is None:  # cgroup v1
            used = system.number(f"{directory}/memory.usage_in_bytes")
            name = "memory.limit_in_bytes"
            files = {name: system.number(f"{directory}/{name}")}
            # This also counts groups above a container's root, which cannot be seen from inside.
            if above := re.search(r"^hierarchical_memory_limit (\d+)$", stat, re.M):
                files["memory.stat: hierarchical_memory_limit"] = int(above[1])
        for name, limit in files.items():
            if limit is not None and used is not None and limit < _UNLIMITED:
                left = max(0, limit - max(0, used - _reclaimable(stat)))
                yield MemoryLimit(name=f"/{directory}/{name}", nbytes=limit, left=left)


def _reclaimable(stat: str) -> int:
    """Return how much page cache and slab the kernel would reclaim before it kills the process.

    All of what was not used lately, and half of the rest: some of it is in use.
    """
    sizes = {k: int(v) for k, v in re.findall(r"^(\w+) (\d+)$", stat, re.M)}

    def size(name: str) -> int:
        # cgroup v1 includes child groups only in `total_*`; v2 has no such lines and includes them.
        return sizes.get(f"total_{name}", sizes.get(name, 0))

    return size("inactive_file") + (size("active_file") + size("slab_reclaimable")) // 2


def _resource_limits(system: System) -> Iterator[MemoryLimit]:
    limits = system.text("proc/self/limits") or ""
    for name, used, command in _RESOURCE_LIMITS:
        if match := re.search(rf"^{name}\s+(\d+)", limits, re.M):
            nbytes = int(match[1])
            left = max(0, nbytes - _status_nbytes(system, used))
            yield MemoryLimit(name=f"`{command}`", nbytes=nbytes, left=left)


def _status_nbytes(system: System, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", system.text("proc/self/status") or "", re.M)
    return int(found[1]) * KiB if found else 0


def _groups(system: System, controller: Controller) -> tuple[str, ...]:
    """Return the directories of our control groups for a controller, from ours up to the root."""
    return _group_directories(system, controller, system.text("proc/self/cgroup") or "")


@lru_cache(maxsize=64)
def _group_directories(system: System, controller: Controller, groups: str) -> tuple[str, ...]:
    # Cached because every allocation asks for the limits, and mountinfo is long in containers.
    # `groups` is part of the key because a process can be moved to another group.
    directories: list[str] = []
    for line in groups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            kind = ""
        elif controller in controllers.split(","):
            kind = controller
        else:
            continue
        for root, point in _mounts(system, kind) or [("/", _DEFAULT_MOUNTS[kind])]:
            directories += _walk_up(_parts(path), _parts(root), point)
    return tuple(dict.fromkeys(directories))


def _walk_up(path: list[str], root: list[str], point: str) -> Iterator[str]:
    """Yield a group's directory and those above it, below a mount that shows `root` of the tree."""
    # In a container, the path may be that on the host, of which the mount shows the end only. With
    # a namespace, `..` leads to groups that cannot be seen from here.
    if path[: len(root)] == root:
        path = path[len(root) :]
    if ".." in path:
        path = []
    for depth in range(len(path), -1, -1):
        yield "/".join([*_parts(point), *path[:depth]])


def _mounts(system: System, kind: str) -> list[tuple[str, str]]:
    """Return (root, mount point) of each mount of cgroup v2 (""), or of a v1 controller."""
    found = []
    for line in (system.text("proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        is_v1 = kinds[0] == "cgroup" and kind != "" and kind in kinds[-1].split(",")
        if (is_v1 or (kinds[0] == "cgroup2" and kind == "")) and ".." not in fields[3]:
            found.append((_unescape(fields[3]), _unescape(fields[4])))
    return found


def _unescape(path: str) -> str:
    """Decode the octal escapes of mountinfo, such as `\\040` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]
