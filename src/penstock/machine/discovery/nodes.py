"""Find memory nodes and decide whether each is DRAM or CXL."""

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
    """Properties of a node, reported by the kernel, that decide its kind."""

    has_cpus: bool
    """Whether the node has CPUs."""

    on_cxl_bus: bool
    """Whether a CXL device provides memory of the node."""

    read_bandwidth: float | None
    """Read bandwidth according to the firmware, in bytes per second."""

    rank: int | None
    """Memory tier in the kernel; a lower number is faster."""


def find_nodes(system: System) -> tuple[MemoryNode, ...]:
    """Return every node whose memory this process may use (`cpuset.mems` can forbid some)."""
    excluded = _gpu_memory_nodes(system)
    known = [n for n in system.memory_nodes() if n not in excluded and system.node_bytes(n).total]
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
    kinds = {n: classify_node(n, evidence) for n in known}
    allowed = [n for n in known if n in system.allowed_nodes()] or known
    if not any(kinds[n] == "dram" for n in allowed):
        # The process is confined to nodes without CPUs. They are all the memory it has.
        kinds = dict.fromkeys(known, "dram")
    nodes = []
    for n in allowed:
        memory = system.node_bytes(n)
        nodes.append(
            MemoryNode(
                id=n,
                kind=kinds[n],
                capacity=memory.total,
                free=min(memory.available, memory.total),
                cpus=system.node_cpus(n),
                distances={k: v for k, v in system.node_distances(n).items() if k in allowed},
                firmware=firmware[n],
                devices=cards[n],
            )
        )
    return tuple(nodes)


def classify_node(node: int, evidence: Mapping[int, Evidence]) -> NodeKind:
    """Classify a node: DRAM if it has CPUs, else CXL unless it is faster than every CPU node.

    A node without CPUs may also be HBM on the processor package (Xeon Max in flat mode). Treating
    it as CXL would put the least urgent tensors into the fastest memory. So a node that is not on
    the CXL bus counts as DRAM if the firmware, or else the kernel's memory tiers, rank it above
    every node with CPUs.
    """
    own = evidence[node]
    if own.has_cpus:
        return "dram"
    if own.on_cxl_bus:
        return "cxl"
    local = [other for other in evidence.values() if other.has_cpus]
    rates = [other.read_bandwidth for other in local if other.read_bandwidth is not None]
    if own.read_bandwidth is not None and rates:
        return "dram" if own.read_bandwidth > max(rates) else "cxl"
    ranks = [other.rank for other in local if other.rank is not None]
    faster = own.rank is not None and bool(ranks) and own.rank < min(ranks)
    return "dram" if faster else "cxl"


def _firmware(system: System, node: int) -> FirmwareFigures | None:
    # access1 describes access by CPUs; access0 may describe access by a GPU or a network card.
    for access in ("access1", "access0"):
        directory = f"{_NODES}/node{node}/{access}/initiators"
        claims = {
            # The kernel reports MB/s and ns, and 0 if the firmware says nothing.
            "read_bandwidth": _scaled(system, f"{directory}/read_bandwidth", times=10**6),
            "write_bandwidth": _scaled(system, f"{directory}/write_bandwidth", times=10**6),
            "read_latency": _scaled(system, f"{directory}/read_latency", per=10**9),
            "write_latency": _scaled(system, f"{directory}/write_latency", per=10**9),
        }
        if any(claims.values()):
            return FirmwareFigures(**claims)
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
    """Return nodes that are GPU memory, as on Grace Hopper: those belong to the HBM tier."""
    gpus = "proc/driver/nvidia/gpus"
    statuses = [system.text(f"{gpus}/{gpu}/numa_status") or "" for gpu in system.names(gpus)]
    nodes = {int(m[1]) for text in statuses if (m := re.search(r"^Node:\s*(\d+)", text, re.M))}
    return {node for node in nodes if not system.node_cpus(node)}
