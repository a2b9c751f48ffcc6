"""Memory nodes, and whether each is DRAM or CXL. Room: measure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.machine.discovery.cxl import find_cxl_memory
from penstock.machine.machine import FirmwareFigures, MemoryNode, NodeKind
from penstock.machine.sysfs import System, parse_ids

_NODES = "sys/devices/system/node"
_TIERS = "sys/devices/virtual/memory_tiering"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the kernel says of one node that bears on its kind."""

    has_cpus: bool
    """CPUs are on it."""

    on_cxl_bus: bool
    """A CXL device's memory is part of it."""

    read_bandwidth: float | None
    """The firmware's claim, bytes per second."""

    rank: int | None
    """The kernel's memory tier: a lower number is faster."""


def find_nodes(system: System) -> tuple[MemoryNode, ...]:
    """Every node whose memory a process can use."""
    taken = _gpu_memory_nodes(system)
    known = [n for n in system.memory_nodes() if n not in taken and system.node_bytes(n).total]
    cards = {n: tuple(c.device for c in find_cxl_memory(system) if c.node == n) for n in known}
    firmware = {n: _firmware(system, n) for n in known}
    ranks = _ranks(system)
    evidence = {}
    for n in known:
        claim = firmware[n]
        evidence[n] = Evidence(
            has_cpus=bool(system.node_cpus(n)),
            on_cxl_bus=bool(cards[n]),
            read_bandwidth=claim.read_bandwidth if claim else None,
            rank=ranks.get(n),
        )
    nodes = []
    for n in known:
        held = system.node_bytes(n)
        nodes.append(
            MemoryNode(
                id=n,
                kind=judge(n, evidence),
                capacity=held.total,
                free=min(held.available, held.total),
                cpus=system.node_cpus(n),
                distances={k: v for k, v in system.node_distances(n).items() if k in known},
                firmware=firmware[n],
                devices=cards[n],
            )
        )
    return tuple(nodes)


def judge(node: int, evidence: Mapping[int, Evidence]) -> NodeKind:
    """DRAM if it has CPUs; CXL if it has none, unless it is the faster memory of the two.

    A node without CPUs may also be HBM on the processor's package (Xeon Max in flat mode). To treat
    that as CXL would send the tensors that can wait to the fastest memory. So a node that the CXL
    bus does not own counts as DRAM when the firmware, or the kernel by its tiers, puts it above
    every node with CPUs.
    """
    mine = evidence[node]
    if mine.has_cpus:
        return "dram"
    if mine.on_cxl_bus:
        return "cxl"
    local = [other for other in evidence.values() if other.has_cpus]
    rates = [other.read_bandwidth for other in local if other.read_bandwidth is not None]
    if mine.read_bandwidth is not None and rates:
        return "dram" if mine.read_bandwidth > max(rates) else "cxl"
    ranks = [other.rank for other in local if other.rank is not None]
    faster = mine.rank is not None and bool(ranks) and mine.rank < min(ranks)
    return "dram" if faster else "cxl"


def _firmware(system: System, node: int) -> FirmwareFigures | None:
    # access1 counts CPUs only; access0 may be what a GPU or a network card sees of the node.
    for access in ("access1", "access0"):
        directory = f"{_NODES}/node{node}/{access}/initiators"
        told = {
            # The kernel gives MB/s and ns, and 0 where the firmware was silent.
            "read_bandwidth": _scaled(system, f"{directory}/read_bandwidth", times=10**6),
            "write_bandwidth": _scaled(system, f"{directory}/write_bandwidth", times=10**6),
            "read_latency": _scaled(system, f"{directory}/read_latency", per=10**9),
            "write_latency": _scaled(system, f"{directory}/write_latency", per=10**9),
        }
        if any(told.values()):
            return FirmwareFigures(**told)
    return None


def _scaled(system: System, path: str, *, times: int = 1, per: int = 1) -> float | None:
    number = system.number(path)
    return number * times / per if number is not None and number > 0 else None


def _ranks(system: System) -> dict[int, int]:
    ranks = {}
    for name in system.names(_TIERS):
        if match := re.fullmatch(r"memory_tier(\d+)", name):
            for node in parse_ids(system.text(f"{_TIERS}/{name}/nodelist") or ""):
                ranks[node] = int(match[1])
    return ranks


def _gpu_memory_nodes(system: System) -> set[int]:
    """Nodes that are a GPU's own memory, as on Grace Hopper: those bytes are the HBM tier's."""
    gpus = "proc/driver/nvidia/gpus"
    told = [system.text(f"{gpus}/{gpu}/numa_status") or "" for gpu in system.names(gpus)]
    nodes = {int(m[1]) for text in told if (m := re.search(r"^Node:\s*(\d+)", text, re.M))}
    return {node for node in nodes if not system.node_cpus(node)}
