"""Checks of memory: nodes, CXL devices, huge pages and kernel settings."""

from __future__ import annotations

import re

from penstock import _native
from penstock.doctor.findings import Finding, ok
from penstock.machine.discovery.cxl import CxlMemory, find_cxl_memory, ram_decoder
from penstock.machine.discovery.nodes import find_nodes
from penstock.machine.sysfs import System
from penstock.units import MiB, format_bytes

_NODES = "sys/devices/system/node"
_HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"
_THP = "sys/kernel/mm/transparent_hugepage/enabled"

_KERNEL_DEFAULT_MAPS = 65530


def check_nodes(system: System) -> Finding:
    """List the memory nodes."""
    found = ", ".join(
        f"node {node.id} {node.kind} {format_bytes(node.capacity)}"
        + ("" if node.cpus else " (no CPUs)")
        for node in find_nodes(system)
    )
    if system.names(_NODES):
        return ok("nodes", found)
    return Finding(
        check="nodes",
        status="note",
        found=f"{found}; the kernel reports no NUMA nodes",
        why="Tensors can only be placed on one node, and CXL memory cannot be distinguished from "
        "DRAM.",
        fix="boot a kernel with CONFIG_NUMA and without `numa=off`; in a sandbox, mount /sys",
    )


def check_cxl(system: System) -> Finding:
    """Check that the memory of every CXL device is online."""
    cards = find_cxl_memory(system)
    if not cards:
        return ok("cxl", "no CXL memory devices")
    online = set(system.memory_nodes())
    idle = [card for card in cards if card.node is None or card.node not in online]
    found = ", ".join(
        f"{card.device} {format_bytes(card.nbytes)} {_describe_node(card)}" for card in cards
    )
    if not idle:
        return ok("cxl", found)
    return Finding(
        check="cxl",
        status="warn",
        found=found,
        why=f"{format_bytes(sum(card.nbytes for card in idle))} of CXL memory is unused because "
        "it does not belong to an online memory node.",
        fix="; ".join(_bring_up(system, card) for card in idle),
    )


def check_movable(system: System) -> Finding:
    """Check for nodes with only movable memory, which is how daxctl brings memory online."""
    normal = system.ids(f"{_NODES}/has_normal_memory")
    movable = [n for n in system.memory_nodes() if normal and n not in normal]
    if not movable:
        return ok("pinning", "no node has only movable memory")
    cards = [card.dax for card in find_cxl_memory(system) if card.node in movable and card.dax]
    dax = cards[0] if cards else "DEVICE"
    return Finding(
        check="pinning",
        status="warn",
        found=f"node {', '.join(map(str, movable))}: only movable memory",
        why="The kernel moves pages off such a node before it pins them, so pinned tensors end up "
        "on another node, or pinning fails.",
        fix=f"`sudo daxctl offline-memory {dax}`, then "
        f"`sudo daxctl online-memory --no-movable {dax}`",
    )


def check_binding(system: System) -> Finding:
    """Call mbind and move_pages on each node. No page is touched, so none is allocated."""
    nodes = system.allowed_nodes()
    for node in nodes:
        place = _native.Placement(_native.Policy.bind, [node], [])
        try:
            region = _native.Region(4096, place, _native.Huge.none, False, 1, {})
            region.move(0, 4096, place)
            _native.count_pages(region.address, 4096, 1)
        except OSError as error:
            return Finding(
                check="binding",
                status="bad",
                found=f"node {node}: {error.strerror or error}",
                why="Tensors cannot be placed on a node or moved, and their node cannot be "
                "queried.",
                fix="in a container, `docker run --cap-add SYS_NICE ...` or use a seccomp "
                "profile that allows mbind and move_pages",
            )
    return ok("binding", f"mbind and move_pages work on {len(nodes)} of {len(nodes)} nodes")


def check_transparent_huge_pages(system: System) -> Finding:
    """Check that transparent huge pages are enabled."""
    setting = re.search(r"\[(\w+)\]", system.text(_THP) or "")
    if setting and setting[1] in ("always", "madvise"):
        return ok("transparent huge pages", setting[1])
    return Finding(
        check="transparent huge pages",
        status="warn",
        found=setting[1] if setting else "not supported by the kernel",
        why="With 4 KiB pages, large ranges take longer to allocate and to pin, and every pass "
        "over them has more TLB misses.",
        fix=f"`echo madvise | sudo tee /{_THP}`",
    )


def check_reserved_huge_pages(system: System) -> Finding:
    """Check for reserved huge pages that nobody uses."""
    reserved, free = (system.number(f"{_HUGE}/{kind}_hugepages") for kind in ("nr", "free"))
    if not reserved:
        return ok("reserved huge pages", "none; only huge='2M' needs them")
    found = f"{reserved} of 2 MiB, {free} free"
    if not free:
        return ok("reserved huge pages", found)
    return Finding(
        check="reserved huge pages",
        status="note",
        found=found,
        why=f"{format_bytes(2 * MiB * free)} is unavailable to everything that does not use "
        "huge='2M'.",
        fix="use huge='2M', or release the pages: `sudo sysctl vm.nr_hugepages=0`",
    )


def check_overcommit(system: System) -> Finding:
    """Check that address space may be reserved without memory behind it."""
    mode = system.number("proc/sys/vm/overcommit_memory")
    if mode != 2:
        return ok("overcommit", f"vm.overcommit_memory={'unknown' if mode is None else mode}")
    return Finding(
        check="overcommit",
        status="warn",
        found="vm.overcommit_memory=2",
        why="Reserved address space counts as used memory, so large arenas and the KV cache, which "
        "reserve more than they touch, cannot be created.",
        fix="`sudo sysctl vm.overcommit_memory=0`",
    )


def check_map_count(system: System) -> Finding:
    """Check the limit on memory mappings."""
    count = system.number("proc/sys/vm/max_map_count")
    if count is None or count >= _KERNEL_DEFAULT_MAPS:
        return ok("map count", f"vm.max_map_count={'unknown' if count is None else count}")
    return Finding(
        check="map count",
        status="warn",
        found=f"vm.max_map_count={count}",
        why="A stripe that is not prefaulted needs one mapping for each 2 MiB, so it is limited to "
        f"{format_bytes(2 * MiB * count)}.",
        fix=f"`sudo sysctl vm.max_map_count={16 * _KERNEL_DEFAULT_MAPS}`",
    )


def check_balancing(system: System) -> Finding:
    """Check whether the kernel moves pages between nodes by itself."""
    mode = system.number("proc/sys/kernel/numa_balancing")
    if not mode or len(system.memory_nodes()) < 2:
        return ok("numa balancing", "off" if not mode else "on, but there is only one node")
    return Finding(
        check="numa balancing",
        status="note",
        found=f"kernel.numa_balancing={mode}",
        why="The kernel unmaps pages to find out who uses them, and moves pages that are not "
        "bound. Every optimizer sweep has extra page faults, and unplaced tensors move between "
        "nodes.",
        fix="`sudo sysctl kernel.numa_balancing=0`",
    )


def _describe_node(card: CxlMemory) -> str:
    return "not on a node" if card.node is None else f"for node {card.node}"


def _bring_up(system: System, card: CxlMemory) -> str:
    """Return the next command that brings the device's memory online."""
    if not card.region:
        decoder = ram_decoder(system) or "decoder0.0"
        return f"`sudo cxl create-region -t ram -d {decoder} -m {card.device}`"
    if not card.dax:
        return f"`sudo cxl enable-region {card.region}`"
    if card.driver != "kmem":
        return f"`sudo daxctl reconfigure-device --mode=system-ram --no-movable {card.dax}`"
    return f"`sudo daxctl online-memory --no-movable {card.dax}`"
