"""What on this machine stands in Penstock's way, and how to mend it. Room: show.

Each check is a function of the kernel's files, so that a test can show it any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.doctor import devices, limits, memory
from penstock.doctor.findings import Finding, render, to_json
from penstock.machine.sysfs import System

__all__ = ["CHECKS", "Finding", "examine", "render", "to_json"]

HERE = System()

CHECKS: Mapping[str, Callable[[System], Finding]] = {
    "python": limits.check_python,
    "instruction sets": limits.check_instruction_sets,
    "kernel": limits.check_wsl,
    "nodes": memory.check_nodes,
    "cxl": memory.check_cxl,
    "pinning": memory.check_movable,
    "binding": memory.check_binding,
    "sys_nice": limits.check_sys_nice,
    "cpuset": limits.check_cpuset,
    "memory limit": limits.check_memory_limit,
    "memlock": limits.check_memlock,
    "transparent huge pages": memory.check_transparent_huge_pages,
    "reserved huge pages": memory.check_reserved_huge_pages,
    "overcommit": memory.check_overcommit,
    "map count": memory.check_map_count,
    "numa balancing": memory.check_balancing,
    "io_uring": devices.check_io_uring,
    "free space": devices.check_free_space,
    "shared memory": devices.check_shared_memory,
    "cuda driver": devices.check_driver,
    "torch": devices.check_torch,
    "cuda versions": devices.check_cuda_versions,
    "pcie links": devices.check_pcie_links,
}
"""By the name of what they find."""


def examine(system: System = HERE) -> tuple[Finding, ...]:
    """Every check, in the order a person would mend them; one that fails is a finding too."""
    return tuple(_attempt(name, check, system) for name, check in CHECKS.items())


def _attempt(name: str, check: Callable[[System], Finding], system: System) -> Finding:
    try:
        return check(system)
    except Exception as failed:  # the machines the doctor is for are odd in ways not thought of
        return Finding(
            check=name,
            status="warn",
            found=f"could not be checked: {type(failed).__name__}: {failed}",
            why="Whether it stands in Penstock's way is not known; the other checks were made.",
            mend="mend what it names; if nothing is wrong there, report it as a bug in Penstock",
        )
