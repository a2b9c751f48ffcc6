"""Check the machine for problems and suggest fixes: `penstock doctor`.

Each check is a function of the kernel's files, so that tests can present any machine to it.
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
    "byte code": limits.check_byte_code,
    "instruction sets": limits.check_instruction_sets,
    "kernel": limits.check_wsl,
    "nodes": memory.check_nodes,
    "cxl": memory.check_cxl,
    "pinning": memory.check_movable,
    "binding": memory.check_binding,
    "sys_nice": limits.check_sys_nice,
    "cpuset": limits.check_cpuset,
    "memory limit": limits.check_memory_limit,
    "cpu quota": limits.check_cpu_quota,
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
"""The checks by name, in the order they are reported."""


def examine(system: System = HERE) -> tuple[Finding, ...]:
    """Run every check, in the order a person would fix problems.

    A check that raises an exception becomes a finding, too.
    """
    return tuple(_run_check(name, check, system) for name, check in CHECKS.items())


def _run_check(name: str, check: Callable[[System], Finding], system: System) -> Finding:
    try:
        return check(system)
    except Exception as error:  # misconfigured machines fail in unforeseen ways
        return Finding(
            check=name,
            status="warn",
            found=f"the check failed: {type(error).__name__}: {error}",
            why="It is unknown whether this is a problem. The other checks have run.",
            fix="fix what the message names; if nothing is wrong there, report a bug in Penstock",
        )
