"""The description of a machine that plans are made from: its parts and their measured speeds.

`discovery` fills it in from the kernel, `penstock probe` adds measurements, and you can write one
by hand for a machine you do not have yet (docs/machine-file.md). These are plain values: nothing in
this module inspects the machine it runs on. The field names are the keys of the machine file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from penstock import records
from penstock.errors import MachineError, UnknownNodeError
from penstock.records import Bytes
from penstock.tiers import Tier

__all__ = [
    "Cpu",
    "Figure",
    "FirmwareFigures",
    "Gpu",
    "GpuLink",
    "Machine",
    "MemoryNode",
    "MemoryRate",
    "Nic",
    "NodeCopy",
    "Provenance",
    "StoragePath",
    "StorageRate",
    "Transfer",
]

MemoryOperation = Literal["read", "write", "copy", "sweep", "shared"]
SweepMoments = Literal["fp32", "bf16", "int8"]
NodeKind = Literal["dram", "cxl"]
Direction = Literal["h2d", "d2h", "both"]
StorageOperation = Literal["read", "write", "both"]
LinkKind = Literal["nvlink", "pcie", "none"]

_SLOWEST_LINKS_FIRST: tuple[LinkKind, ...] = ("none", "pcie", "nvlink")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A measured quantity and its spread. A file may contain a plain number, without a spread."""

    median: float
    """Median of the samples, in the unit documented for the field that holds the figure."""

    low: float
    """Lowest sample."""

    high: float
    """Highest sample."""

    samples: int = 0
    """Number of samples; 0 if the value was stated and not measured."""

    def __post_init__(self) -> None:
        _check_above_zero(self, "median", "low", "high")
        _check_at_least(self, 0, "samples")
        if not self.low <= self.median <= self.high:
            raise MachineError(
                "median", f"must be between low {self.low} and high {self.high}, got {self.median}"
            )

    @classmethod
    def from_number(cls, value: float) -> Figure:
        """Return a stated figure without a spread."""
        return cls(median=value, low=value, high=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRate:
    """Bandwidth that CPU threads reach in one node's memory."""

    operation: MemoryOperation
    """Operation measured. `copy` counts its bytes once, although each byte is read and written.
    `sweep` is the optimizer's pass over weights, moments and gradients, and counts every byte that
    is read or written. `shared` is such a pass while a GPU copies in both directions, and counts
    the bytes of both."""

    threads: int = 1
    """Number of concurrent threads, on the CPUs nearest to the node."""

    moments: SweepMoments | None = None
    """Storage format of the moments, for a sweep only. Absent: the rate holds for any format."""

    parameters: int | None = None
    """Number of parameters updated in one pass, for a sweep only. Absent: a large number."""

    bytes_per_second: Figure
    """Total over all threads."""

    def __post_init__(self) -> None:
        _check_one_of(self, "operation", MemoryOperation)
        _check_at_least(self, 1, "threads", "parameters")
        if self.moments is not None:
            _check_one_of(self, "moments", SweepMoments)
        for name in ("moments", "parameters"):
            if getattr(self, name) is not None and self.operation != "sweep":
                raise MachineError(name, f'belongs to a "sweep", not to a "{self.operation}"')


@dataclass(frozen=True, kw_only=True, slots=True)
class FirmwareFigures:
    """Speed of a node for its nearest CPUs, according to the firmware (ACPI HMAT, CDAT for CXL).

    The firmware states these figures without measuring them; in virtual machines and on early CXL
    cards they can be far off.
    """

    read_bandwidth: float | None = None
    """Bytes per second."""

    write_bandwidth: float | None = None
    """Bytes per second."""

    read_latency: float | None = None
    """Seconds."""

    write_latency: float | None = None
    """Seconds."""

    def __post_init__(self) -> None:
        _check_above_zero(
            self, "read_bandwidth", "write_bandwidth", "read_latency", "write_latency"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNode:
    """A NUMA node that has memory."""

    id: int
    """Node number in the kernel. The numbers may have gaps."""

    kind: NodeKind
    """Tier that the memory belongs to."""

    capacity: Bytes
    """Total memory of the node."""

    free: Bytes | None = None
    """Memory that could be allocated when the file was written."""

    cpus: tuple[int, ...] = ()
    """CPUs on the node; empty for CXL memory."""

    distances: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Relative distance to each node according to the kernel; 10 is the node itself."""

    firmware: FirmwareFigures | None = None
    """Speed according to the firmware."""

    devices: tuple[str, ...] = ()
    """CXL devices that provide the memory, such as `mem0`."""

    latency: Figure | None = None
    """Latency of one dependent load on an idle machine, in seconds."""

    rates: tuple[MemoryRate, ...] = ()
    """Measured rates for each operation and number of threads."""

    def __post_init__(self) -> None:
        _check_one_of(self, "kind", NodeKind)
        _check_at_least(self, 0, "id", "free")
        _check_above_zero(self, "capacity")
        _check_at_most_field(self, "free", "capacity")
        for other, distance in self.distances.items():
            if distance < 10:
                raise MachineError(
                    f"distances[{other}]", f"must be 10 or more (10 is local), got {distance}"
                )
        object.__setattr__(self, "distances", MappingProxyType(dict(self.distances)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A MappingProxyType cannot be pickled, and machines are sent to other processes.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(MemoryNode, **values | {"distances": dict(self.distances)}), ()

    @property
    def tier(self) -> Tier:
        """Tier of the node's memory."""
        return Tier(self.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCopy:
    """Bandwidth of CPU copies from one node to another."""

    source: int
    """Node that is read."""

    target: int
    """Node that is written."""

    threads: int = 1
    """Number of concurrent threads."""

    bytes_per_second: Figure
    """Total over all threads, each byte counted once."""

    def __post_init__(self) -> None:
        _check_at_least(self, 1, "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU with its own memory (HBM or GDDR) and its link to the host."""

    index: int
    """Index in `nvidia-smi`, in PCI bus order. CUDA may order GPUs differently: see `uuid`."""

    name: str = ""
    """Product name."""

    memory: Bytes | None = None
    """Total GPU memory; absent if there was no driver to report it."""

    free: Bytes | None = None
    """GPU memory that was free when the file was written."""

    pcie_generation: int | None = None
    """Highest PCIe generation the link supports. An idle link runs slower."""

    pcie_width: int | None = None
    """Number of PCIe lanes in use."""

    node: int | None = None
    """Memory node nearest to the GPU."""

    uuid: str = ""
    """Unique identifier of this GPU in the driver."""

    capability: str = ""
    """CUDA compute capability, such as `9.0`. Absent: 8.0 or higher is assumed."""

    matmul_flops: Figure | None = None
    """Operations per second in large 16-bit matrix multiplications."""

    block_flops: Figure | None = None
    """Operations per second sustained in a complete transformer layer, including attention."""

    compiled_flops: Figure | None = None
    """Operations per second sustained in a compiled transformer layer."""

    attention_flops: Figure | None = None
    """Operations per second in the quadratic part of attention, with long sequences."""

    memory_bandwidth: Figure | None = None
    """Bandwidth of the GPU memory in bytes per second, reads and writes combined."""

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "index", "free")
        _check_above_zero(self, "memory", "pcie_generation", "pcie_width")
        _check_at_most_field(self, "free", "memory")
        if self.capability and not re.fullmatch(r"\d+\.\d+", self.capability):
            raise MachineError("capability", f'must have the form "9.0", got "{self.capability}"')

    @property
    def capability_numbers(self) -> tuple[int, int] | None:
        """Major and minor number of the compute capability, or None if it is not known."""
        if not self.capability:
            return None
        major, minor = self.capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Bandwidth of copies between one memory node and GPUs."""

    direction: Direction
    """`h2d` (host to device), `d2h` (device to host), or `both` concurrently."""

    gpus: tuple[int, ...]
    """Indices of the GPUs that copy concurrently."""

    node: int
    """Node that holds the host buffers."""

    nbytes: Bytes
    """Size of one copy."""

    streams: int = 1
    """Number of copies in flight in each direction on each GPU."""

    bytes_per_second: Figure
    """Total over all GPUs and, for `both`, over the two directions."""

    def __post_init__(self) -> None:
        _check_one_of(self, "direction", Direction)
        _check_above_zero(self, "nbytes")
        _check_at_least(self, 1, "streams")
        if not self.gpus or len(set(self.gpus)) < len(self.gpus):
            raise MachineError(
                "gpus", f"must list at least one GPU, and each only once, got {self.gpus}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLink:
    """How some GPUs reach each other: a pair, or a group in which all pairs are alike."""

    gpus: tuple[int, ...]
    """Indices of the GPUs."""

    kind: LinkKind
    """`nvlink`, `pcie` for peer access over PCIe, or `none` if copies pass through host memory."""

    bytes_per_second: Figure | None = None
    """What each of the GPUs sends while it receives as much, and all of them do so."""

    def __post_init__(self) -> None:
        _check_one_of(self, "kind", LinkKind)
        if len(set(self.gpus)) < max(2, len(self.gpus)):
            raise MachineError(
                "gpus", f"must list at least two GPUs, and each only once, got {self.gpus}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network card to other machines."""

    name: str
    """Name of the interface in the kernel, such as `eth0` or `mlx5_0`."""

    bytes_per_second: Figure | None = None
    """Bytes per second in one direction."""

    latency: Figure | None = None
    """Seconds until a small message arrives at another machine."""

    node: int | None = None
    """Memory node nearest to the card."""

    direct: bool = False
    """Whether it reads and writes GPU memory without a copy in host memory (GPUDirect RDMA)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRate:
    """Bandwidth of reads and writes on one storage path, bypassing the page cache."""

    operation: StorageOperation
    """Operation measured. `both` reads and writes the same number of bytes concurrently."""

    block: Bytes
    """Size of one request."""

    depth: int = 1
    """Number of requests in flight."""

    bytes_per_second: Figure
    """Total over all requests."""

    def __post_init__(self) -> None:
        _check_one_of(self, "operation", StorageOperation)
        _check_above_zero(self, "block")
        _check_at_least(self, 1, "depth")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoragePath:
    """A directory or raw block device that Penstock may store data on."""

    path: str
    """Path of the directory or device."""

    device: str = ""
    """Block device under the path; empty if there is none (tmpfs, network)."""

    model: str = ""
    """Model name reported by the drive."""

    file_system: str = ""
    """Type of the file system; empty for a raw device."""

    block: Bytes = 4096
    """Logical block size of the device. Direct requests are multiples of it."""

    capacity: Bytes | None = None
    """Total size."""

    free: Bytes | None = None
    """Space available to a file; for a raw device, its total size."""

    rotational: bool | None = None
    """Whether it is a spinning disk."""

    direct: bool | None = None
    """Whether O_DIRECT works on this path."""

    rated_writes: Bytes | None = None
    """Total bytes written that the vendor rates the drive for (TBW)."""

    rates: tuple[StorageRate, ...] = ()
    """Measured rates for each operation, request size and queue depth."""

    def __post_init__(self) -> None:
        if not self.path:
            raise MachineError(
                "path", "must be the path of a directory or a block device, got an empty string"
            )
        _check_above_zero(self, "capacity", "rated_writes")
        _check_at_least(self, 0, "free")
        _check_at_most_field(self, "free", "capacity")
        if self.block < 1 or self.block & (self.block - 1):
            raise MachineError("block", f"must be a power of two, got {self.block}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processors of the machine."""

    model: str = ""
    """Model name reported by the processor."""

    cores: int | None = None
    """Number of physical cores. The nodes' `cpus` list hardware threads."""

    isas: tuple[str, ...] = ()
    """Instruction sets that the optimizer sweep can use, by their names in the kernel."""

    def __post_init__(self) -> None:
        if self.cores is not None and self.cores < 1:
            raise MachineError("cores", f"must be 1 or more, got {self.cores}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origin of the numbers."""

    by: str = ""
    """Program and its version, or a person."""

    date: str = ""
    """Date and time in UTC, as ISO 8601."""

    kernel: str = ""
    """Release of the kernel."""

    command: str = ""
    """Command that was run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """A limit on the host memory of a process, over all nodes."""

    name: str
    """What sets it: the kernel's file, such as `/sys/fs/cgroup/job/memory.max`, or `ulimit -v`."""

    nbytes: Bytes
    """The limit."""

    left: Bytes
    """What could be allocated below it when it was read."""

    def __post_init__(self) -> None:
        _check_at_least(self, 0, "nbytes", "left")
        _check_at_most_field(self, "left", "nbytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory nodes, GPUs and storage of one machine, with their speeds as far as known."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """Version of the file format."""

    name: str = ""
    """Name of the machine."""

    made: Provenance = field(default_factory=Provenance)
    """Origin of the numbers."""

    cpu: Cpu = field(default_factory=Cpu)
    """Processors."""

    nodes: tuple[MemoryNode, ...]
    """All nodes with memory; at least one is of kind `dram`."""

    node_copies: tuple[NodeCopy, ...] = ()
    """Measured copies between nodes."""

    gpus: tuple[Gpu, ...] = ()
    """GPUs."""

    transfers: tuple[Transfer, ...] = ()
    """Measured copies between nodes and GPUs."""

    gpu_links: tuple[GpuLink, ...] = ()
    """How the GPUs reach each other."""

    nics: tuple[Nic, ...] = ()
    """Network cards to other machines."""

    machines: int = 1
    """Number of such machines that train together, connected by their network cards."""

    storage: tuple[StoragePath, ...] = ()
    """Directories and devices that Penstock may store data on."""

    process_memory: Bytes | None = None
    """Host memory of a process that has loaded Penstock and PyTorch and, if there is a GPU, has
    started CUDA and compiled a layer. None if it was not measured."""

    memory_limit: MemoryLimit | None = None
    """The tightest limit on the host memory of this process, with the memory of the process itself
    counted as left. None if there is none, or it is above the memory of the nodes."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise MachineError("version", f"must be {self.FORMAT}, got {self.version}")
        _check_at_least(self, 1, "machines")
        self._check_nodes()
        self._check_devices()

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine file. A MachineError names the field that is wrong."""
        return records.load(cls, path, error=MachineError)

    def save(self, path: str | Path) -> None:
        """Write a machine file atomically. A failure leaves an existing file unchanged."""
        records.save(self, path)

    def node(self, id: int) -> MemoryNode:
        """Return the node with this number, or raise UnknownNodeError."""
        for node in self.nodes:
            if node.id == id:
                return node
        raise UnknownNodeError(id, [node.id for node in self.nodes])

    @property
    def dram_nodes(self) -> tuple[MemoryNode, ...]:
        """The nodes of kind `dram`."""
        return tuple(node for node in self.nodes if node.kind == "dram")

    @property
    def cxl_nodes(self) -> tuple[MemoryNode, ...]:
        """The nodes of kind `cxl`."""
        return tuple(node for node in self.nodes if node.kind == "cxl")

    def gpu_link(self, gpus: Iterable[int]) -> GpuLink | None:
        """Return the link over which these GPUs exchange data; None if it is not known.

        It is as slow as the slowest link between two of them. A group's own entry comes first.
        """
        wanted = tuple(gpus)
        covering = [link for link in self.gpu_links if set(wanted) <= set(link.gpus)]
        if covering:
            return min(covering, key=lambda link: len(link.gpus))
        links = [self._pair_link(pair) for pair in combinations(wanted, 2)]
        known = [link for link in links if link is not None]
        if not known or len(known) < len(links):
            return None
        kind = min((link.kind for link in known), key=_SLOWEST_LINKS_FIRST.index)
        figures = [link.bytes_per_second for link in known if link.kind == kind]
        measured = [figure for figure in figures if figure is not None]
        slowest = min(measured, key=lambda figure: figure.median, default=None)
        return GpuLink(gpus=wanted, kind=kind, bytes_per_second=slowest)

    def _pair_link(self, pair: tuple[int, int]) -> GpuLink | None:
        both = [link for link in self.gpu_links if set(pair) <= set(link.gpus)]
        return min(both, key=lambda link: len(link.gpus), default=None)

    def rate(
        self, node: int, operation: MemoryOperation, threads: int | None = None
    ) -> Figure | None:
        """Return the best measured rate, for one thread count or any; None if not measured."""
        measured = (
            rate.bytes_per_second
            for rate in self.node(node).rates
            if rate.operation == operation and threads in (None, rate.threads)
        )
        return max(measured, key=lambda figure: figure.median, default=None)

    def sweep_rate(self, node: int, moments: SweepMoments) -> Figure | None:
        """Return the best measured rate of the longest sweeps with these moments, or None.

        Rates without a moment format are used if none was measured for this format.
        """
        sweeps = [rate for rate in self.node(node).rates if rate.operation == "sweep"]
        matching = [rate for rate in sweeps if rate.moments == moments]
        matching = matching or [rate for rate in sweeps if rate.moments is None]
        longest = max((rate.parameters or math.inf for rate in matching), default=0)
        measured = (r.bytes_per_second for r in matching if (r.parameters or math.inf) == longest)
        return max(measured, key=lambda figure: figure.median, default=None)

    def _check_nodes(self) -> None:
        ids = [node.id for node in self.nodes]
        _check_unique("nodes", "id", ids)
        if not self.dram_nodes:
            raise MachineError("nodes", 'must include at least one of kind "dram", got none')
        _check_unique("nodes", "CPU", [cpu for node in self.nodes for cpu in node.cpus])
        for i, node in enumerate(self.nodes):
            for other in node.distances:
                _check_known(f"nodes[{i}].distances", "node", other, ids)
        for i, copy in enumerate(self.node_copies):
            _check_known(f"node_copies[{i}].source", "node", copy.source, ids)
            _check_known(f"node_copies[{i}].target", "node", copy.target, ids)

    def _check_devices(self) -> None:
        ids = [node.id for node in self.nodes]
        indices = [gpu.index for gpu in self.gpus]
        _check_unique("gpus", "index", indices)
        for i, gpu in enumerate(self.gpus):
            if gpu.node is not None:
                _check_known(f"gpus[{i}].node", "node", gpu.node, ids)
        for i, transfer in enumerate(self.transfers):
            _check_known(f"transfers[{i}].node", "node", transfer.node, ids)
            for index in transfer.gpus:
                _check_known(f"transfers[{i}].gpus", "GPU", index, indices)
        for i, link in enumerate(self.gpu_links):
            for index in link.gpus:
                _check_known(f"gpu_links[{i}].gpus", "GPU", index, indices)
        _check_unique("nics", "name", [nic.name for nic in self.nics])
        for i, nic in enumerate(self.nics):
            if nic.node is not None:
                _check_known(f"nics[{i}].node", "node", nic.node, ids)
        _check_unique("storage", "path", [storage.path for storage in self.storage])


def _check_known(field_path: str, thing: str, id: int, known: Iterable[int]) -> None:
    known = list(known)
    if id not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise MachineError(field_path, f"there is no {thing} {id}; the file lists {listed}")


def _check_unique(field_path: str, thing: str, values: Iterable[int | str]) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise MachineError(field_path, f"{thing} {value} is listed twice")
        seen.add(value)


def _check_above_zero(part: object, *names: str) -> None:
    # Like the checks below, this accepts an absent value and rejects NaN.
    for name in names:
        value = getattr(part, name)
        if value is not None and not 0 < value < float("inf"):
            raise MachineError(name, f"must be above 0, got {value}")


def _check_at_least(part: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and not value >= least:
            raise MachineError(name, f"must be {least} or more, got {value}")


def _check_at_most_field(part: object, name: str, limit: str) -> None:
    value, most = getattr(part, name), getattr(part, limit)
    if value is not None and most is not None and value > most:
        raise MachineError(name, f"must be at most {limit}, which is {most}, got {value}")


def _check_one_of(part: object, name: str, choices: object) -> None:
    if getattr(part, name) not in get_args(choices):
        wanted = " or ".join(f'"{choice}"' for choice in get_args(choices))
        raise MachineError(name, f'must be {wanted}, got "{getattr(part, name)}"')
