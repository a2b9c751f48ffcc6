"""The parts a machine is made of: memory nodes, GPUs, storage, and what was measured of each.

Room: measure. Plain values: nothing here looks at the machine it runs on. `machine.py` puts them
together and checks what one part says of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from penstock.errors import MachineError
from penstock.figures import (
    Figure,
    check_above_zero,
    check_at_least,
    check_no_more_than,
    check_one_of,
)
from penstock.node_rates import MemoryRate
from penstock.records import Bytes
from penstock.tiers import Tier

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
