"""Samplers: memory, disks, cores and GPUs, read from the kernel, torch and the NVIDIA driver.

A sampler adds what it knows to a `Reading`. A sampler that fails is switched off with a note: a
sample is never worth an error in the program that is observed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.machine.discovery.gpus import open_nvml
from penstock.machine.sysfs import System
from penstock.observe.records import GpuSample, HostSample, Sample
from penstock.tiers import Tier
from penstock.units import KiB

if TYPE_CHECKING:
    from penstock.engine.memory_usage import MemoryUsage

SECTOR = 512
"""The unit of /proc/diskstats, independent of the block size of the disk."""

PAGE = os.sysconf("SC_PAGE_SIZE")

MAX_READ = 1 << 16
"""Bytes read of one kernel file. The cores come first in /proc/stat, and 1000 of them fit."""

PCIE_UNIT = 1000
"""The driver reports PCIe traffic in kB per second."""

DRIVER_EVERY = 20
"""The driver is asked for the memory of this process at every 20th sample: it takes milliseconds,
and the answer changes only when a library or a kernel is loaded."""

PCIE_PAUSE = 0.01
"""Seconds between two queries of the PCIe counters."""


@dataclass(slots=True)
class Reading:
    """A sample that is being filled in."""

    gpus: dict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    host: dict[str, Any] = field(default_factory=dict)
    disk: dict[str, tuple[int, int]] = field(default_factory=dict)
    cpu: tuple[float, ...] = ()
    tiers: dict[str, int] = field(default_factory=dict)

    def sample(self, t: float, step: int | None, phase: str | None) -> Sample:
        """Build the sample."""
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
    """A source of measurements. It is read at every `every`-th sample: some are slow to read."""

    name: str
    every: int

    def read(self, into: Reading) -> None:
        """Add measurements to a reading."""


class Samplers:
    """Reads a list of samplers in order."""

    def __init__(self, samplers: Sequence[Sampler], note: Callable[[str], None]) -> None:
        self._samplers, self._note = list(samplers), note
        self._count = 0

    def read(self) -> Reading:
        """Take one reading, and drop samplers that fail."""
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


# The kernel's counters.


class KernelFile:
    """A file in /proc or /sys that stays open, so that reading it again is one system call."""

    def __init__(self, system: System, path: str) -> None:
        self._path = system.root / path
        self._file: int | None = None

    def read(self) -> bytes:
        """Return the first bytes of the file. Raises OSError if it cannot be read."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        return os.pread(self._file, MAX_READ, 0)

    def nbytes_after(self, name: bytes) -> int:
        """Return the number after a name, which the file gives in kB, as bytes."""
        text = self.read()
        at = text.find(name)
        if at < 0:
            raise OSError(f"{self._path} has no {name.decode()}")
        return int(text[at + len(name) :].split(None, 1)[0]) * KiB


class ProcessMemory:
    """Resident memory of this process, or of another one and its descendants."""

    name = "process memory"

    def __init__(self, pid: int | None = None, system: System | None = None) -> None:
        self._pid, self._system = pid, system or System()
        self.every = 1 if pid is None else 4  # a tree of processes means many files
        self._own = KernelFile(self._system, "proc/self/statm")

    def read(self, into: Reading) -> None:
        if self._pid is None:
            pages = int(self._own.read().split()[1])
        else:
            pages = self._pages_of_tree(str(self._pid))
        into.host["rss"] = pages * PAGE

    def _pages_of_tree(self, pid: str) -> int:
        children = self._system.text(f"proc/{pid}/task/{pid}/children") or ""
        return self._pages(pid) + sum(self._pages_of_tree(child) for child in children.split())

    def _pages(self, pid: str) -> int:
        text = self._system.text(f"proc/{pid}/statm")  # None if the process has ended
        return int(text.split()[1]) if text else 0


class MachineMemory:
    """Memory that is available on the machine."""

    name = "available memory"
    every = 2

    def __init__(self, system: System | None = None) -> None:
        self._file = KernelFile(system or System(), "proc/meminfo")

    def read(self, into: Reading) -> None:
        into.host["available"] = self._file.nbytes_after(b"MemAvailable:")


class NodeMemory:
    """Memory in use on each memory node."""

    name = "memory nodes"
    every = 4

    def __init__(self, system: System | None = None) -> None:
        system = system or System()
        path = "sys/devices/system/node/node{}/meminfo"
        self._files = {
            str(node): KernelFile(system, path.format(node)) for node in system.memory_nodes()
        }

    def read(self, into: Reading) -> None:
        into.host["nodes"] = {node: f.nbytes_after(b"MemUsed:") for node, f in self._files.items()}


class DiskTraffic:
    """Bytes that each disk has read and written."""

    name = "disk traffic"
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


class CoreLoad:
    """Load of each CPU core since the previous sample."""

    name = "CPU load"
    every = 4

    def __init__(self, system: System | None = None) -> None:
        self._file = KernelFile(system or System(), "proc/stat")
        self._before: list[tuple[int, int]] = []

    def read(self, into: Reading) -> None:
        now, before = self._ticks(), self._before
        self._before = now
        shares = []
        for (busy, total), (busy_before, total_before) in zip(now, before, strict=False):
            elapsed = total - total_before
            shares.append(round((busy - busy_before) / elapsed, 3) if elapsed > 0 else 0.0)
        into.cpu = tuple(min(1.0, max(0.0, share)) for share in shares)

    def _ticks(self) -> list[tuple[int, int]]:
        """Return the busy and the total ticks of each core."""
        counts = []
        for line in self._file.read().split(b"\nintr", 1)[0].splitlines()[1:]:
            ticks = [int(word) for word in line.split()[1:9]]
            idle = sum(ticks[3:5])  # idle, and waiting for I/O
            counts.append((sum(ticks) - idle, sum(ticks)))
        return counts


# Torch and Penstock engines.


class TorchMemory:
    """GPU memory and pinned memory held by torch. It never initializes CUDA itself."""

    name = "torch memory"
    every = 1

    def read(self, into: Reading) -> None:
        torch: Any = sys.modules.get("torch")
        cuda: Any = getattr(torch, "cuda", None)
        if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
            return
        for index in range(cuda.device_count()):
            # Not torch.cuda.memory_stats, which flattens and sorts 150 names on every call.
            stats = torch._C._cuda_memoryStats(index)
            into.gpus[index]["allocated"] = int(stats["allocated_bytes"]["all"]["current"])
            into.gpus[index]["reserved"] = int(stats["reserved_bytes"]["all"]["current"])
            into.gpus[index]["peak"] = int(stats["allocated_bytes"]["all"]["peak"])
        pinned = cuda.host_memory_stats_as_nested_dict()
        if pinned:
            into.host["pinned"] = int(pinned["allocated_bytes"]["current"])


class TierMemorySampler:
    """Memory that Penstock engines hold in each tier, as `Engine.tiers` reports it.

    On a GPU, the HBM tier is what torch has reserved there, and what the driver reports for this
    process in addition; this sampler must come after `TorchMemory`.
    """

    name = "tiers"
    every = 1

    def __init__(self) -> None:
        self.memory_usages: Callable[[], Iterable[MemoryUsage]] = tuple
        """Returns the memory usage of each engine; `EngineWatcher` sets it."""
        self._count = 0

    def read(self, into: Reading) -> None:
        ask_driver = self._count % DRIVER_EVERY == 0
        self._count += 1
        for usage in self.memory_usages():
            if ask_driver:
                usage.ask_driver()
            for tier, nbytes in usage.tiers.items():
                into.tiers[tier.value] = into.tiers.get(tier.value, 0) + nbytes
            self._read_hbm(usage, into)
            if usage.pinned:
                into.host["pinned"] = into.host.get("pinned", 0) + usage.pinned

    def _read_hbm(self, usage: MemoryUsage, into: Reading) -> None:
        if usage.gpu is not None:
            # Several engines on one GPU share torch's allocator, so this is not a sum.
            gpu = into.gpus.get(usage.gpu, {})
            if "reserved" in gpu:
                into.tiers[Tier.HBM.value] = gpu["reserved"] + usage.nbytes_outside_torch
        elif nbytes := usage.by_tier()[Tier.HBM].used:
            into.tiers[Tier.HBM.value] = into.tiers.get(Tier.HBM.value, 0) + nbytes


# The NVIDIA driver.


class GpuDriver:
    """Memory in use, utilisation and PCIe traffic of each GPU, as the driver reports them.

    `close` stops the PCIe thread and releases the driver's library.
    """

    name = "GPU driver statistics"
    every = 2

    def __init__(self, opened: Callable[[], Any] = open_nvml) -> None:
        self._stack = ExitStack()
        self._nvml: Any = self._stack.enter_context(opened())
        self.handles = visible_gpus(self._nvml) if self._nvml is not None else []
        self._pcie = PcieTraffic(self._nvml, self.handles) if self.handles else None

    def read(self, into: Reading) -> None:
        for index, handle in enumerate(self.handles):
            values = into.gpus[index]
            values["used"] = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            with contextlib.suppress(self._nvml.NVMLError):  # MIG devices do not report it
                rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
                values["utilisation"] = rates.gpu / 100
            if self._pcie is not None and index in self._pcie.rates:
                values["h2d"], values["d2h"] = self._pcie.rates[index]

    def close(self) -> None:
        if self._pcie is not None:
            self._pcie.close()
        self._stack.close()


class PcieTraffic:
    """Bytes per second to and from each GPU.

    The driver counts for 20 ms in every query, so a separate thread asks and the sampler reads the
    latest answer.
    """

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self.rates: dict[int, tuple[float, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="penstock pcie", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        nvml = self._nvml
        # Received and transmitted as seen from the GPU.
        counters = (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
        while not self._stop.wait(PCIE_PAUSE):
            for index, handle in enumerate(self._handles):
                try:
                    h2d, d2h = (nvml.nvmlDeviceGetPcieThroughput(handle, c) for c in counters)
                except nvml.NVMLError:
                    self.rates.pop(index, None)
                    return  # a GPU without these counters will not have them later
                self.rates[index] = (float(h2d * PCIE_UNIT), float(d2h * PCIE_UNIT))


def visible_gpus(nvml: Any) -> list[Any]:
    """Return the handles of the GPUs that this process may use, in CUDA's order."""
    count = nvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles = []
    for name in (part.strip() for part in visible.split(",")):
        try:
            if name.isdigit():
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError:
            break  # CUDA ignores everything after the first invalid entry
    return handles
