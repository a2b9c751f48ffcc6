"""What one machine is, and how fast: the value that plans are made from. Room: measure.

`discovery` fills it from the kernel, `probe` adds what it measures, and a person may write it by
hand for a machine that is not there yet (docs/machine-file.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from penstock import record_files
from penstock.errors import MachineError, UnknownNodeError
from penstock.figures import Figure
from penstock.machine_parts import (
    FirmwareFigures,
    Gpu,
    MemoryNode,
    NodeCopy,
    StoragePath,
    StorageRate,
    Transfer,
)
from penstock.node_rates import MemoryOperation, MemoryRate, SweepMoments

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
        return record_files.load(cls, path, error=MachineError)

    def save(self, path: str | Path) -> None:
        """Write it whole, or leave what was there."""
        record_files.save(self, path)

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
