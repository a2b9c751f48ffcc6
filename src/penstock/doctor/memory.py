"""Nodes, CXL devices, pages, and the kernel's settings about them. Room: show."""

from __future__ import annotations

import re

from penstock import _native
from penstock.doctor.findings import Finding, fine
from penstock.machine.discovery.cxl import CxlMemory, find_cxl_memory, ram_decoder
from penstock.machine.discovery.nodes import find_nodes
from penstock.machine.sysfs import System
from penstock.units import MiB, format_bytes

_NODES = "sys/devices/system/node"
_HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"
_THP = "sys/kernel/mm/transparent_hugepage/enabled"

_KERNEL_DEFAULT_MAPS = 65530


def check_nodes(system: System) -> Finding:
    found = ", ".join(
        f"node {node.id} {node.kind} {format_bytes(node.capacity)}"
        + ("" if node.cpus else " (no CPUs)")
        for node in find_nodes(system)
    )
    if system.names(_NODES):
        return fine("nodes", found)
    return Finding(
        check="nodes",
        status="note",
        found=f"{found}; the kernel shows no NUMA nodes",
        why="Per-tensor placement has one place only, and CXL memory cannot be told apart.",
        mend="boot a kernel with CONFIG_NUMA and without `numa=off`; in a sandbox mount /sys",
    )


def check_cxl(system: System) -> Finding:
    cards = find_cxl_memory(system)
    if not cards:
        return fine("cxl", "no CXL memory devices")
    online = set(system.memory_nodes())
    idle = [card for card in cards if card.node is None or card.node not in online]
    found = ", ".join(f"{card.device} {format_bytes(card.nbytes)} {_place(card)}" for card in cards)
    if not idle:
        return fine("cxl", found)
    return Finding(
        check="cxl",
        status="warn",
        found=found,
        why=f"{format_bytes(sum(card.nbytes for card in idle))} of CXL memory is not in use: "
        "it is not part of any memory node.",
        mend="; ".join(_bring_up(system, card) for card in idle),
    )


def check_movable(system: System) -> Finding:
    """daxctl brings memory up as movable unless told otherwise."""
    normal = system.ids(f"{_NODES}/has_normal_memory")
    movable = [n for n in system.memory_nodes() if normal and n not in normal]
    if not movable:
        return fine("pinning", "no node is for movable memory only")
    cards = [card.dax for card in find_cxl_memory(system) if card.node in movable and card.dax]
    dax = cards[0] if cards else "DEVICE"
    return Finding(
        check="pinning",
        status="warn",
        found=f"node {', '.join(map(str, movable))}: movable memory only",
        why="The kernel moves pages off such a node before it pins them, so tensors that are "
        "registered with a GPU end up elsewhere, or registering them fails.",
        mend=f"`sudo daxctl offline-memory {dax}`, then "
        f"`sudo daxctl online-memory --no-movable {dax}`",
    )


def check_binding(system: System) -> Finding:
    """Ask the kernel for real: nothing is touched, so no page is taken."""
    nodes = system.allowed_nodes()
    for node in nodes:
        place = _native.Placement(_native.Policy.bind, [node], [])
        try:
            region = _native.Region(4096, place, _native.Huge.none, False, 1, {})
            region.move(0, 4096, place)
            _native.count_pages(region.address, 4096, 1)
        except OSError as refused:
            return Finding(
                check="binding",
                status="bad",
                found=f"node {node}: {refused.strerror or refused}",
                why="Tensors cannot be placed on a node, moved or looked up.",
                mend="in a container `docker run --cap-add SYS_NICE ...`, or a seccomp profile "
                "that allows mbind and move_pages",
            )
    return fine("binding", f"mbind and move_pages work on {len(nodes)} of {len(nodes)} nodes")


def check_transparent_huge_pages(system: System) -> Finding:
    setting = re.search(r"\[(\w+)\]", system.text(_THP) or "")
    if setting and setting[1] in ("always", "madvise"):
        return fine("transparent huge pages", setting[1])
    return Finding(
        check="transparent huge pages",
        status="warn",
        found=setting[1] if setting else "the kernel has none",
        why="With 4 KiB pages large ranges take longer to touch and to register with the GPU, and "
        "every pass over them misses the TLB more.",
        mend=f"`echo madvise | sudo tee /{_THP}`",
    )


def check_reserved_huge_pages(system: System) -> Finding:
    reserved, free = (system.number(f"{_HUGE}/{kind}_hugepages") for kind in ("nr", "free"))
    if not reserved:
        return fine("reserved huge pages", "none; only huge='2M' needs them")
    held = f"{reserved} of 2 MiB, {free} free"
    if not free:
        return fine("reserved huge pages", held)
    return Finding(
        check="reserved huge pages",
        status="note",
        found=held,
        why=f"{format_bytes(2 * MiB * free)} is kept from all that does not ask for huge='2M'.",
        mend="use huge='2M', or give them back: `sudo sysctl vm.nr_hugepages=0`",
    )


def check_overcommit(system: System) -> Finding:
    mode = system.number("proc/sys/vm/overcommit_memory")
    if mode != 2:
        return fine("overcommit", f"vm.overcommit_memory={'unknown' if mode is None else mode}")
    return Finding(
        check="overcommit",
        status="warn",
        found="vm.overcommit_memory=2",
        why="Address space counts as memory in use: large arenas and the KV space, which reserve "
        "more than they touch, are refused.",
        mend="`sudo sysctl vm.overcommit_memory=0`",
    )


def check_map_count(system: System) -> Finding:
    count = system.number("proc/sys/vm/max_map_count")
    if count is None or count >= _KERNEL_DEFAULT_MAPS:
        return fine("map count", f"vm.max_map_count={'unknown' if count is None else count}")
    return Finding(
        check="map count",
        status="warn",
        found=f"vm.max_map_count={count}",
        why="A stripe that is not touched at once is one mapping per 2 MiB unit, so it can be "
        f"{format_bytes(2 * MiB * count)} at most.",
        mend=f"`sudo sysctl vm.max_map_count={16 * _KERNEL_DEFAULT_MAPS}`",
    )


def check_balancing(system: System) -> Finding:
    mode = system.number("proc/sys/kernel/numa_balancing")
    if not mode or len(system.memory_nodes()) < 2:
        return fine("numa balancing", "off" if not mode else "on, with one node to balance")
    return Finding(
        check="numa balancing",
        status="note",
        found=f"kernel.numa_balancing={mode}",
        why="The kernel unmaps pages to see who uses them and moves those that are not bound: "
        "extra faults in every sweep, and unplaced tensors drift between nodes.",
        mend="`sudo sysctl kernel.numa_balancing=0`",
    )


def _place(card: CxlMemory) -> str:
    return "on no node" if card.node is None else f"for node {card.node}"


def _bring_up(system: System, card: CxlMemory) -> str:
    """The next command towards a node, from where the device is now."""
    if not card.region:
        decoder = ram_decoder(system) or "decoder0.0"
        return f"`sudo cxl create-region -t ram -d {decoder} -m {card.device}`"
    if not card.dax:
        return f"`sudo cxl enable-region {card.region}`"
    if card.driver != "kmem":
        return f"`sudo daxctl reconfigure-device --mode=system-ram --no-movable {card.dax}`"
    return f"`sudo daxctl online-memory --no-movable {card.dax}`"
