"""Describe the machine that a program is observed on, and how fast its links can be."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.machine.discovery import discover
from penstock.machine.discovery.storage import find_storage
from penstock.machine.machine import Machine
from penstock.machine.sysfs import System
from penstock.observe.records import GpuInfo, Hardware, NodeInfo


def describe_hardware(system: System | None = None) -> Hardware:
    """Collect what the kernel and the driver report about the machine."""
    system = system or System()
    machine = discover(system)
    return Hardware(
        cpus=os.cpu_count() or 1,
        cpu_name=machine.cpu.model if machine.cpu is not None else "",
        gpus=tuple(GpuInfo(gpu.index, gpu.name, gpu.memory) for gpu in machine.gpus),
        nodes=tuple(NodeInfo(node.id, node.kind, node.capacity) for node in machine.nodes),
        disks=physical_disks(system),
    )


def physical_disks(system: System) -> tuple[str, ...]:
    """List the physical disks: not loop, RAM or device-mapper devices."""
    block = "sys/block"
    names = system.names(block)
    return tuple(name for name in names if "device" in system.names(f"{block}/{name}"))


def disk_name(path: str, system: System | None = None) -> str:
    """Return the kernel's name of the disk that holds a path, or the path if it is unknown."""
    system = system or System()
    device = find_storage(system, path).device
    name = Path(device).name
    if not name:
        return path
    # A partition's directory lies inside that of its disk.
    whole = Path(os.path.realpath(system.root / f"sys/class/block/{name}"))
    return whole.parent.name if (whole / "partition").exists() else name


def ceilings(machine: Machine) -> dict[str, float]:
    """Return the bytes per second that each link was measured to carry, from a machine file."""
    found: dict[str, float] = {}
    for transfer in machine.transfers:
        link = {"h2d": "h2d", "d2h": "d2h"}.get(transfer.direction)
        if link is not None:
            found[link] = max(found.get(link, 0.0), transfer.bytes_per_second.median)
    for node in machine.nodes:
        # A copy reads and writes every byte, but the probe counts it once. A sweep's rate is not
        # one of the memory itself.
        weights = {"copy": 2.0, "sweep": 0.0}
        rates = [weights.get(r.operation, 1.0) * r.bytes_per_second.median for r in node.rates]
        if any(rates):
            found[f"node{node.id}"] = max(rates)
    for path in machine.storage:
        for rate in path.rates:
            link = f"disk:{disk_name(path.path)}:{rate.operation}"
            found[link] = max(found.get(link, 0.0), rate.bytes_per_second.median)
    return found
