"""A measured number with its spread, and the checks that measured values share. Room: measure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from penstock import records
from penstock.errors import MachineError, UnknownNodeError
from penstock.records import Bytes
from penstock.tiers import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured quantity and its spread. In a file a plain number will do: it has no spread."""

    median: float
    """The middle of the samples, in the unit that the field holding the figure names."""

    low: float
    """The lowest sample."""

    high: float
    """The highest sample."""

    samples: int = 0
    """How many times it was measured. 0: stated by someone, not measured."""

    def __post_init__(self) -> None:
        check_above_zero(self, "median", "low", "high")
        check_at_least(self, 0, "samples")
        if not self.low <= self.median <= self.high:
            raise MachineError(
                "median", f"must lie from low {self.low} to high {self.high}, got {self.median}"
            )

    @classmethod
    def from_number(cls, value: float) -> Figure:
        return cls(median=value, low=value, high=value)


# Checks that several parts share. An absent value passes; NaN does not.


def check_above_zero(part: object, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and not 0 < value < float("inf"):
            raise MachineError(name, f"must be above 0, got {value}")


def check_at_least(part: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and not value >= least:
            raise MachineError(name, f"must be {least} or more, got {value}")


def check_no_more_than(part: object, name: str, limit: str) -> None:
    value, most = getattr(part, name), getattr(part, limit)
    if value is not None and most is not None and value > most:
        raise MachineError(name, f"must be no more than {limit}, which is {most}, got {value}")


def check_one_of(part: object, name: str, choices: object) -> None:
    if getattr(part, name) not in get_args(choices):
        wanted = " or ".join(f'"{choice}"' for choice in get_args(choices))
        raise MachineError(name, f'must be {wanted}, got "{getattr(part, name)}"')


# --------
# What was measured of one memory node's speed. Room: measure.

MemoryOperation = Literal["read", "write", "copy", "sweep"]
SweepMoments = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRate:
    """How fast threads stream through one node's memory."""

    operation: MemoryOperation
    """A copy counts its bytes once, though each is read and written. A sweep is the optimizer's
    pass over parameters, moments and gradients, with every byte read or written counted."""

    threads: int = 1
    """Threads at work at once, on the CPUs nearest to the node."""

    moments: SweepMoments | None = None
    """Of a sweep: how the moments rest. Absent: in whatever way."""

    parameters: int | None = None
    """Of a sweep: how many are stepped in one pass. Absent: many."""

    bytes_per_second: Figure
    """All threads together."""

    def __post_init__(self) -> None:
        check_one_of(self, "operation", MemoryOperation)
        check_at_least(self, 1, "threads", "parameters")
        if self.moments is not None:
            check_one_of(self, "moments", SweepMoments)
        for name in ("moments", "parameters"):
            if getattr(self, name) is not None and self.operation != "sweep":
                raise MachineError(name, f'belongs to a "sweep", not to a "{self.operation}"')


# --------
# The parts a machine is made of: memory nodes, GPUs, storage, and what was measured of each.
#
# Room: measure. Plain values: nothing here looks at the machine it runs on. `machine.py` puts
# them
# together and checks what one part says of another.

NodeKind = Literal["dram", "cxl"]
Direction = Literal["h2d", "d2h", "both"]
StorageOperation = Literal["read", "write", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirmwareFigures:
    """What the firmware claims of a node (ACPI HMAT, or CDAT for CXL), seen from the nearest CPUs.

    A claim, not a measurement: virtual machines and early CXL cards are known to be far off.
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
        check_above_zero(self, "read_bandwidth", "write_bandwidth", "read_latency", "write_latency")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNode:
    """One NUMA node that has memory."""

    id: int
    """The kernel's number for it. Numbers may have gaps."""

    kind: NodeKind
    """Which tier its memory belongs to."""

    capacity: Bytes
    """All of its memory."""

    free: Bytes | None = None
    """What could be taken when the file was made."""

    cpus: tuple[int, ...] = ()
    """The CPUs on it; none for CXL memory."""

    distances: Mapping[int, int] = field(default_factory=dict, hash=False)
    """The kernel's relative distance to each node; 10 is the node itself."""

    firmware: FirmwareFigures | None = None
    """What the firmware claims of its speed."""

    devices: tuple[str, ...] = ()
    """The CXL devices its memory is on, such as `mem0`."""

    latency: Figure | None = None
    """Seconds for one dependent load, nothing else running."""

    rates: tuple[MemoryRate, ...] = ()
    """Measured rates, by operation and number of threads."""

    def __post_init__(self) -> None:
        check_one_of(self, "kind", NodeKind)
        check_at_least(self, 0, "id", "free")
        check_above_zero(self, "capacity")
        check_no_more_than(self, "free", "capacity")
        for other, distance in self.distances.items():
            if distance < 10:
                raise MachineError(
                    f"distances[{other}]", f"must be 10 or more (10 is local), got {distance}"
                )
        object.__setattr__(self, "distances", MappingProxyType(dict(self.distances)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled, and machines travel to other processes.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(MemoryNode, **values | {"distances": dict(self.distances)}), ()

    @property
    def tier(self) -> Tier:
        return Tier(self.kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCopy:
    """How fast the CPUs copy from one node to another."""

    source: int
    """The node read."""

    target: int
    """The node written."""

    threads: int = 1
    """Threads at work at once."""

    bytes_per_second: Figure
    """All threads together, each byte counted once."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, with its own memory (HBM or GDDR) and its link to the host."""

    index: int
    """Its number as `nvidia-smi` counts, in PCI bus order. CUDA may count otherwise: see `uuid`."""

    name: str = ""
    """The model's name."""

    memory: Bytes | None = None
    """All of its memory; absent where only the driver could say and there was none."""

    free: Bytes | None = None
    """What was not in use when the file was made."""

    pcie_generation: int | None = None
    """The fastest the link can run. It idles slower."""

    pcie_width: int | None = None
    """Lanes in use."""

    node: int | None = None
    """The memory node nearest to it."""

    uuid: str = ""
    """The driver's name for this very card."""

    capability: str = ""
    """The CUDA compute capability, such as `9.0`."""

    matmul_flops: Figure | None = None
    """Operations per second in large 16-bit matrix products."""

    block_flops: Figure | None = None
    """Operations per second sustained in a whole transformer layer, attention included."""

    compiled_flops: Figure | None = None
    """The same where the layer is compiled."""

    attention_flops: Figure | None = None
    """Operations per second in attention's quadratic part alone, in long sequences."""

    memory_bandwidth: Figure | None = None
    """Bytes per second of its own memory, reads and writes together."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "index", "free")
        check_above_zero(self, "memory", "pcie_generation", "pcie_width")
        check_no_more_than(self, "free", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """How fast bytes cross between one memory node and GPUs."""

    direction: Direction
    """`h2d` from host to device, `d2h` back, `both` at the same time."""

    gpus: tuple[int, ...]
    """The GPUs at work at once, by index."""

    node: int
    """The node that holds the host's side."""

    nbytes: Bytes
    """The length of one copy."""

    streams: int = 1
    """Copies in flight in each direction on each GPU."""

    bytes_per_second: Figure
    """Summed over all the GPUs and, for `both`, over the two directions."""

    def __post_init__(self) -> None:
        check_one_of(self, "direction", Direction)
        check_above_zero(self, "nbytes")
        check_at_least(self, 1, "streams")
        if not self.gpus or len(set(self.gpus)) < len(self.gpus):
            raise MachineError("gpus", f"must name one GPU or more, each once, got {self.gpus}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRate:
    """How fast one path is read or written, past the page cache."""

    operation: StorageOperation
    """What was done. `both`: as many bytes read as written, at the same time."""

    block: Bytes
    """The length of one request."""

    depth: int = 1
    """Requests in flight."""

    bytes_per_second: Figure
    """All requests together."""

    def __post_init__(self) -> None:
        check_one_of(self, "operation", StorageOperation)
        check_above_zero(self, "block")
        check_at_least(self, 1, "depth")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoragePath:
    """A directory, or a raw block device, where bytes may rest."""

    path: str
    """Where it is."""

    device: str = ""
    """The block device below it; empty where there is none (tmpfs, network)."""

    model: str = ""
    """What the drive calls itself."""

    file_system: str = ""
    """Its kind; empty for a raw device."""

    block: Bytes = 4096
    """The device's logical block: direct requests are whole multiples of it."""

    capacity: Bytes | None = None
    """All of it."""

    free: Bytes | None = None
    """What a file could still take; for a raw device, all of it."""

    rotational: bool | None = None
    """A spinning disk."""

    direct: bool | None = None
    """Whether O_DIRECT works here."""

    rated_writes: Bytes | None = None
    """Bytes that its maker says can be written over its life (TBW)."""

    rates: tuple[StorageRate, ...] = ()
    """Measured rates, by operation, request length and depth."""

    def __post_init__(self) -> None:
        if not self.path:
            raise MachineError("path", "must name a directory or a block device, got an empty text")
        check_above_zero(self, "capacity", "rated_writes")
        check_at_least(self, 0, "free")
        check_no_more_than(self, "free", "capacity")
        if self.block < 1 or self.block & (self.block - 1):
            raise MachineError("block", f"must be a power of two, got {self.block}")


# --------
# What one machine is, and how fast: the value that plans are made from. Room: measure.
#
# `discovery` fills it from the kernel, `probe` adds what it measures, and a person may write it
# by
# hand for a machine that is not there yet (docs/machine-file.md).

__all__ = [
    "Cpu",
    "Figure",
    "FirmwareFigures",
    "Gpu",
    "Machine",
    "MemoryNode",
    "MemoryRate",
    "NodeCopy",
    "Provenance",
    "StoragePath",
    "StorageRate",
    "Transfer",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processors, taken together."""

    model: str = ""
    """What the processor calls itself."""

    cores: int | None = None
    """Physical cores. Hardware threads are counted by the nodes' `cpus`."""

    isas: tuple[str, ...] = ()
    """The instruction sets that matter for a sweep, by the kernel's names."""

    def __post_init__(self) -> None:
        if self.cores is not None and self.cores < 1:
            raise MachineError("cores", f"must be 1 or more, got {self.cores}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where the numbers come from."""

    by: str = ""
    """The program and its version, or a person."""

    date: str = ""
    """When, as ISO 8601 in UTC."""

    kernel: str = ""
    """The kernel it ran on."""

    command: str = ""
    """What was run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory nodes, GPUs and storage of one machine, with what is known of their speed."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT
    """The version of the file's form."""

    name: str = ""
    """What people call the machine."""

    made: Provenance = field(default_factory=Provenance)
    """Where the numbers come from."""

    cpu: Cpu = field(default_factory=Cpu)
    """The processors."""

    nodes: tuple[MemoryNode, ...]
    """Every node with memory; at least one is `dram`."""

    node_copies: tuple[NodeCopy, ...] = ()
    """Measured copies from node to node."""

    gpus: tuple[Gpu, ...] = ()
    """The GPUs."""

    transfers: tuple[Transfer, ...] = ()
    """Measured copies between nodes and GPUs."""

    storage: tuple[StoragePath, ...] = ()
    """The directories and devices where bytes may rest."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise MachineError("version", f"must be {self.FORMAT}, got {self.version}")
        self._check_nodes()
        self._check_devices()

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine file. MachineError names the field that is wrong."""
        return records.load(cls, path, error=MachineError)

    def save(self, path: str | Path) -> None:
        """Write it whole, or leave what was there."""
        records.save(self, path)

    def node(self, id: int) -> MemoryNode:
        for node in self.nodes:
            if node.id == id:
                return node
        raise UnknownNodeError(id, [node.id for node in self.nodes])

    @property
    def dram_nodes(self) -> tuple[MemoryNode, ...]:
        return tuple(node for node in self.nodes if node.kind == "dram")

    @property
    def cxl_nodes(self) -> tuple[MemoryNode, ...]:
        return tuple(node for node in self.nodes if node.kind == "cxl")

    def rate(
        self, node: int, operation: MemoryOperation, threads: int | None = None
    ) -> Figure | None:
        """The best measured rate, of all thread counts or of that one; None if not measured."""
        measured = (
            rate.bytes_per_second
            for rate in self.node(node).rates
            if rate.operation == operation and threads in (None, rate.threads)
        )
        return max(measured, key=lambda figure: figure.median, default=None)

    def sweep_rate(self, node: int, moments: SweepMoments) -> Figure | None:
        """The best measured rate of long sweeps of that format; None if not measured.

        Figures that name no format stand in where those moments have none of their own.
        """
        sweeps = [rate for rate in self.node(node).rates if rate.operation == "sweep"]
        fitting = [rate for rate in sweeps if rate.moments == moments]
        fitting = fitting or [rate for rate in sweeps if rate.moments is None]
        longest = max((rate.parameters or math.inf for rate in fitting), default=0)
        measured = (r.bytes_per_second for r in fitting if (r.parameters or math.inf) == longest)
        return max(measured, key=lambda figure: figure.median, default=None)

    def _check_nodes(self) -> None:
        ids = [node.id for node in self.nodes]
        _check_unique("nodes", "id", ids)
        if not self.dram_nodes:
            raise MachineError("nodes", 'must have one of kind "dram" or more, got none')
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
        _check_unique("storage", "path", [storage.path for storage in self.storage])


def _check_known(field_path: str, thing: str, id: int, known: Iterable[int]) -> None:
    known = list(known)
    if id not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise MachineError(field_path, f"there is no {thing} {id}; the file has {listed}")


def _check_unique(field_path: str, thing: str, values: Iterable[int | str]) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise MachineError(field_path, f"{thing} {value} is there twice")
        seen.add(value)
