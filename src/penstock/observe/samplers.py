"""What is read at every sample: memory, disks and cores, from the kernel and torch. Room: show.

A sampler adds what it knows to a Reading. One that fails is switched off, with a note: a sample is
never worth an error in the program that is observed.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.machine.sysfs import System
from penstock.observe.records import GpuSample, HostSample, Sample
from penstock.tiers import Tier
from penstock.units import KiB

if TYPE_CHECKING:
    from penstock.engine.memory_usage import MemoryUsage

SECTOR = 512  # what /proc/diskstats counts in, whatever the disk's blocks are

PAGE = os.sysconf("SC_PAGE_SIZE")

LONGEST = 1 << 16
"""What is read of one file; of /proc/stat, whose cores come first, 1000 fit."""


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


class KernelFile:
    """A file of the kernel's, kept open: to read it again is one call."""

    def __init__(self, system: System, path: str) -> None:
        self._path = system.root / path
        self._file: int | None = None

    def read(self) -> bytes:
        """Its first bytes. OSError where it cannot be read."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        return os.pread(self._file, LONGEST, 0)

    def kib_of(self, name: bytes) -> int:
        """The number after a name, in bytes, where the file gives it in kB."""
        text = self.read()
        at = text.find(name)
        if at < 0:
            raise OSError(f"{self._path} does not say {name.decode()}")
        return int(text[at + len(name) :].split(None, 1)[0]) * KiB


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
            into.gpus[index]["peak"] = int(stats["allocated_bytes"]["all"]["peak"])
        pinned = cuda.host_memory_stats_as_nested_dict()
        if pinned:
            into.host["pinned"] = int(pinned["allocated_bytes"]["current"])


class ProcessMemory:
    """Resident bytes of a process and of those it started."""

    name = "the process's memory"

    def __init__(self, pid: int | None = None, system: System | None = None) -> None:
        self._pid, self._system = pid, system or System()
        self.every = 1 if pid is None else 4  # of many processes it is many files
        self._own = KernelFile(self._system, "proc/self/statm")

    def read(self, into: Reading) -> None:
        if self._pid is None:
            pages = int(self._own.read().split()[1])
        else:
            pages = self._tree(str(self._pid))
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
    every = 2

    def __init__(self, system: System | None = None) -> None:
        self._file = KernelFile(system or System(), "proc/meminfo")

    def read(self, into: Reading) -> None:
        into.host["available"] = self._file.kib_of(b"MemAvailable:")


class NodeMemory:
    """What is in use on each memory node."""

    name = "memory nodes"
    every = 4

    def __init__(self, system: System | None = None) -> None:
        system = system or System()
        path = "sys/devices/system/node/node{}/meminfo"
        self._files = {
            str(node): KernelFile(system, path.format(node)) for node in system.memory_nodes()
        }

    def read(self, into: Reading) -> None:
        into.host["nodes"] = {node: f.kib_of(b"MemUsed:") for node, f in self._files.items()}


class Disks:
    """Bytes that each disk has read and written."""

    name = "disks"
    every = 4

    def __init__(self, names: Sequence[str], system: System | None = None) -> None:
        self._names = {name.encode() for name in names}
        self._file = KernelFile(system or System(), "proc/diskstats")

    def read(self, into: Reading) -> None:
        for line in self._file.read().splitlines() if self._names else ():
            words = line.split(None, 10)
            if len(words) > 9 and words[2] in self._names:
                moved = (int(words[5]) * SECTOR, int(words[9]) * SECTOR)
                into.disk[words[2].decode()] = moved


class Cores:
    """How busy each core was since the sample before."""

    name = "cores"
    every = 4

    def __init__(self, system: System | None = None) -> None:
        self._file = KernelFile(system or System(), "proc/stat")
        self._before: list[tuple[int, int]] = []

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
        for line in self._file.read().split(b"\nintr", 1)[0].splitlines()[1:]:
            ticks = [int(word) for word in line.split()[1:9]]
            idle = sum(ticks[3:5])  # idle, and waiting for a disk
            found.append((sum(ticks) - idle, sum(ticks)))
        return found


class Held:
    """What engines of Penstock's own hold in each tier. HBM is what torch says, so it comes after
    torch's; where no GPU computes nobody counts it."""

    name = "tiers"
    every = 1

    def __init__(self) -> None:
        self.ask: Callable[[], Iterable[MemoryUsage]] = tuple

    def read(self, into: Reading) -> None:
        for holding in self.ask():
            for tier, nbytes in holding.tiers.items():
                into.tiers[tier.value] = into.tiers.get(tier.value, 0) + nbytes
            gpu = {} if holding.gpu is None else into.gpus.get(holding.gpu, {})
            if "allocated" in gpu:
                into.tiers[Tier.HBM.value] = gpu["allocated"]
            if holding.pinned:
                into.host["pinned"] = into.host.get("pinned", 0) + holding.pinned
