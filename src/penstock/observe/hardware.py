"""What a program is observed on, and how fast its links could be. Room: show."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.machine.discovery import discover
from penstock.machine.discovery.storage import find_storage
from penstock.machine.machine import Machine
from penstock.machine.sysfs import System
from penstock.observe.observation import GpuPart, Hardware, NodePart


def hardware(system: System | None = None) -> Hardware:
    """What the kernel and the driver say."""
    system = system or System()
    machine = discover(system)
    return Hardware(
        cpus=os.cpu_count() or 1,
        cpu_name=machine.cpu.model if machine.cpu is not None else "",
        gpus=tuple(GpuPart(gpu.index, gpu.name, gpu.memory) for gpu in machine.gpus),
        nodes=tuple(NodePart(node.id, node.kind, node.capacity) for node in machine.nodes),
        disks=disks(system),
    )


def disks(system: System) -> tuple[str, ...]:
    """Disks that are things: not those that the kernel makes of files, memory or other disks."""
    block = "sys/block"
    names = system.names(block)
    return tuple(name for name in names if "device" in system.names(f"{block}/{name}"))


def disk_name(path: str, system: System | None = None) -> str:
    """The disk below a path, as the kernel calls it; the path where that is not known."""
    system = system or System()
    device = find_storage(system, path).device
    name = Path(device).name
    if not name:
        return path
    whole = Path(os.path.realpath(system.root / f"sys/class/block/{name}"))
    return whole.parent.name if (whole / "partition").exists() else name


def ceilings(machine: Machine) -> dict[str, float]:
    """Bytes a second that each link was measured to carry, from a machine file."""
    found: dict[str, float] = {}
    for transfer in machine.transfers:
        link = {"h2d": "h2d", "d2h": "d2h"}.get(transfer.direction)
        if link is not None:
            found[link] = max(found.get(link, 0.0), transfer.bytes_per_second.median)
    for node in machine.nodes:
        both = {"copy": 2.0, "sweep": 0.0}  # a copy's bytes are read and written, and counted once
        rates = [both.get(r.operation, 1.0) * r.bytes_per_second.median for r in node.rates]
        if any(rates):
            found[f"node{node.id}"] = max(rates)
    for path in machine.storage:
        for rate in path.rates:
            link = f"disk:{disk_name(path.path)}:{rate.operation}"
            found[link] = max(found.get(link, 0.0), rate.bytes_per_second.median)
    return found
