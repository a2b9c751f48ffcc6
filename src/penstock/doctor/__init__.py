"""What on this machine stands in Penstock's way, and how to mend it. Room: show.

Each check is a function of the kernel's files, so that a test can show it any machine.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.doctor import devices, limits, memory
from penstock.doctor.findings import Finding, render, to_json
from penstock.system import System

__all__ = ["CHECKS", "Finding", "examine", "render", "to_json"]

HERE = System()

CHECKS: tuple[Callable[[System], Finding], ...] = (
    limits.check_python,
    limits.check_instruction_sets,
    limits.check_wsl,
    memory.check_nodes,
    memory.check_cxl,
    memory.check_movable,
    memory.check_binding,
    limits.check_sys_nice,
    limits.check_cpuset,
    limits.check_memory_limit,
    limits.check_memlock,
    memory.check_transparent_huge_pages,
    memory.check_reserved_huge_pages,
    memory.check_overcommit,
    memory.check_map_count,
    memory.check_balancing,
    devices.check_io_uring,
    devices.check_free_space,
    devices.check_shared_memory,
    devices.check_driver,
    devices.check_torch,
    devices.check_cuda_versions,
    devices.check_pcie_links,
)


def examine(system: System = HERE) -> tuple[Finding, ...]:
    """Every check, in the order a person would mend them."""
    return tuple(check(system) for check in CHECKS)
