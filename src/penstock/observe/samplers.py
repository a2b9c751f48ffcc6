"""What is read at every sample: memory, disks and cores, from the kernel and torch. Room: show.

A sampler adds what it knows to a Reading. One that fails is switched off, with a note: a sample is
never worth an error in the program that is observed.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.observe.records import GpuSample, HostSample, Sample
from penstock.system import System
from penstock.units import KiB

SECTOR = 512  # what /proc/diskstats counts in, whatever the disk's blocks are

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Reading:
    """A sample being made."""

    gpus: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    host: dict[str, Any] = field(default_factory=dict)
    disk: dict[str, tuple[int, int]] = field(default_factory=dict)
    cpu: tuple[float, ...] = ()
    tiers: dict[str, int] = field(default_factory=dict)

    def sample(self, t: float, step: int | None, phase: str | None) -> Sample:
        count = max(self.gpus, default=-1) + 1
        return Sample(
            t=t,
            step=step,
            phase=phase,
            gpu=tuple(GpuSample(**self.gpus.get(index, {})) for index in range(count)),
            host=HostSample(**self.host),
            disk=self.disk,
            cpu=self.cpu,
            tiers=self.tiers,
        )


class Sampler(Protocol):
    """One source. `every` says at how many samples it is read once: some are slow to read."""

    name: str
    every: int

    def read(self, into: Reading) -> None: ...


class Samplers:
    """All of them, in turn."""

    def __init__(self, samplers: Sequence[Sampler], note: Callable[[str], None]) -> None:
        self._samplers, self._note = list(samplers), note
        self._count = 0

    def read(self) -> Reading:
        reading = Reading()
        for sampler in list(self._samplers):
            if self._count % sampler.every:
                continue
            try:
                sampler.read(reading)
            except Exception as failed:
                self._samplers.remove(sampler)
                self._note(f"{sampler.name} is no longer sampled: {failed}")
        self._count += 1
        return reading


class TorchMemory:
    """What torch holds on GPUs and of pinned memory. Never the first to touch a GPU."""

    name = "torch's memory"
    every = 1

    def read(self, into: Reading) -> None:
        torch: Any = sys.modules.get("torch")
        cuda: Any = getattr(torch, "cuda", None)
        if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
            return
        for index in range(cuda.device_count()):
            stats = torch._C._cuda_memoryStats(index)  # torch.cuda.memory_stats sorts 150 names
            into.gpus[index]["allocated"] = int(stats["allocated_bytes"]["all"]["current"])
            into.gpus[index]["reserved"] = int(stats["reserved_bytes"]["all"]["current"])
        pinned = cuda.host_memory_stats_as_nested_dict()
        if pinned:
            into.host["pinned"] = int(pinned["allocated_bytes"]["current"])


class ProcessMemory:
    """Resident bytes of a process and of those it started."""

    name = "the process's memory"
    every = 1

    def __init__(self, pid: int | None = None, system: System | None = None) -> None:
        self._pid, self._system = pid, system or System()

    def read(self, into: Reading) -> None:
        pages = self._pages("self") if self._pid is None else self._tree(str(self._pid))
        into.host["rss"] = pages * PAGE

    def _tree(self, pid: str) -> int:
        found = self._system.text(f"proc/{pid}/task/{pid}/children") or ""
        return self._pages(pid) + sum(self._tree(child) for child in found.split())

    def _pages(self, pid: str) -> int:
        text = self._system.text(f"proc/{pid}/statm")  # gone is nothing held
        return int(text.split()[1]) if text else 0


class MachineMemory:
    """What the machine could still give."""

    name = "available memory"
    every = 1

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()

    def read(self, into: Reading) -> None:
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB", self._system.text("proc/meminfo") or "", re.M
        )
        if found is None:
            raise OSError("/proc/meminfo does not say MemAvailable")
        into.host["available"] = int(found[1]) * KiB


class NodeMemory:
    """What is in use on each memory node."""

    name = "memory nodes"
    every = 4

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._nodes = self._system.memory_nodes()

    def read(self, into: Reading) -> None:
        into.host["nodes"] = {str(node): self._used(node) for node in self._nodes}

    def _used(self, node: int) -> int:
        text = self._system.text(f"sys/devices/system/node/node{node}/meminfo")
        found = re.search(r"MemUsed:\s+(\d+) kB", text or "")
        if found is None:
            raise OSError(f"the kernel does not say what node {node} holds")
        return int(found[1]) * KiB


class Disks:
    """Bytes that each disk has read and written."""

    name = "disks"
    every = 4

    def __init__(self, names: Sequence[str], system: System | None = None) -> None:
        self._names, self._system = set(names), system or System()

    def read(self, into: Reading) -> None:
        for line in (self._system.text("proc/diskstats") or "").splitlines():
            words = line.split()
            if len(words) > 9 and words[2] in self._names:
                into.disk[words[2]] = (int(words[5]) * SECTOR, int(words[9]) * SECTOR)


class Cores:
    """How busy each core was since the sample before."""

    name = "cores"
    every = 2

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self._before = self._counts()

    def read(self, into: Reading) -> None:
        now, before = self._counts(), self._before
        self._before = now
        shares = []
        for (busy, total), (busy_then, total_then) in zip(now, before, strict=False):
            passed = total - total_then
            shares.append(round((busy - busy_then) / passed, 3) if passed > 0 else 0.0)
        into.cpu = tuple(min(1.0, max(0.0, share)) for share in shares)

    def _counts(self) -> list[tuple[int, int]]:
        """Per core, ticks at work and in all."""
        found = []
        for line in (self._system.text("proc/stat") or "").splitlines():
            if line.startswith("cpu") and line[3:4].isdigit():
                ticks = [int(word) for word in line.split()[1:9]]
                idle = sum(ticks[3:5])  # idle, and waiting for a disk
                found.append((sum(ticks) - idle, sum(ticks)))
        return found


class Held:
    """What an engine of Penstock's own holds in each tier."""

    name = "tiers"
    every = 1

    def __init__(self) -> None:
        self.tiers: dict[str, int] = {}
        self.pinned = 0

    def read(self, into: Reading) -> None:
        into.tiers = self.tiers
        if self.pinned:
            into.host["pinned"] = into.host.get("pinned", 0) + self.pinned
