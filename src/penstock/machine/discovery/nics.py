"""Find network cards and their speed as the kernel reports it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.machine.machine import Figure, MemoryNode, Nic
from penstock.machine.sysfs import System

_NET = "sys/class/net"
_INFINIBAND = "sys/class/infiniband"

_BITS = 8


def find_nics(system: System, nodes: Sequence[MemoryNode]) -> tuple[Nic, ...]:
    """Return the cards that are connected, with the speed of their link.

    Bridges, tunnels and the loopback have no device, and are left out. An InfiniBand card may also
    have a network interface. It is listed once, with the speed of its port.
    """
    ids = [node.id for node in nodes]
    # Peer memory of the NVIDIA driver lets such cards read and write GPU memory.
    direct = bool(system.names("sys/module/nvidia_peermem"))
    cards: dict[str, Nic] = {}
    for name in system.names(_INFINIBAND):
        speed = sum(
            _gigabits(system.text(f"{_INFINIBAND}/{name}/ports/{port}/rate"))
            for port in system.names(f"{_INFINIBAND}/{name}/ports")
            if "ACTIVE" in (system.text(f"{_INFINIBAND}/{name}/ports/{port}/state") or "")
        )
        if speed:
            rate = Figure.from_number(speed * 1e9 / _BITS)
            node = _node(system, f"{_INFINIBAND}/{name}", ids)
            cards[_device(system, f"{_INFINIBAND}/{name}")] = Nic(
                name=name, bytes_per_second=rate, node=node, direct=direct
            )
    for name in system.names(_NET):
        device = _device(system, f"{_NET}/{name}")
        megabits = system.number(f"{_NET}/{name}/speed")
        if device and device not in cards and megabits is not None and megabits > 0:
            rate = Figure.from_number(megabits * 1e6 / _BITS)
            node = _node(system, f"{_NET}/{name}", ids)
            cards[device] = Nic(name=name, bytes_per_second=rate, node=node)
    return tuple(cards.values())


def _device(system: System, path: str) -> str:
    """Return the real path of the card; "" if the interface has none."""
    device = system.root / path / "device"
    return str(device.resolve()) if device.exists() else ""


def _node(system: System, path: str, ids: Sequence[int]) -> int | None:
    node = system.number(f"{path}/device/numa_node")
    return node if node in ids else None


def _gigabits(text: str | None) -> float:
    """Return the gigabits per second of a port: `"400 Gb/sec (4X NDR)"` is 400."""
    match = re.match(r"([\d.]+) Gb/sec", text or "")
    return float(match[1]) if match else 0.0
