"""Ask the OS how much host memory processes use.

Resident memory is everything that is in memory now: what Penstock allocated, the heap, thread
stacks, the code of shared libraries, and mapped files that were read. Memory on the GPU is not part
of it.
"""

from __future__ import annotations

import re

from penstock.machine.sysfs import System
from penstock.units import KiB


def resident_nbytes(system: System | None = None) -> int:
    """Return the resident memory of this process; 0 if the kernel does not report it."""
    return _status_nbytes("VmRSS", system or System())


def peak_resident_nbytes(system: System | None = None) -> int:
    """Return the most resident memory this process has had; 0 if the kernel does not report it."""
    return _status_nbytes("VmHWM", system or System())


def tree_nbytes(pid: int, system: System | None = None) -> int:
    """Return the resident memory of a process, and what its descendants add; 0 if not reported.

    A descendant shares the pages of its parent until one of them writes. So it counts with its
    proportional set size, in which a page of n processes counts as an nth.
    """
    system = system or System()
    return _rollup_nbytes(pid, "Rss", system) + _added_by_descendants(pid, system)


def _added_by_descendants(pid: int, system: System) -> int:
    total = 0
    for task in system.names(f"proc/{pid}/task"):  # each thread may have started processes
        for child in (system.text(f"proc/{pid}/task/{task}/children") or "").split():
            total += _rollup_nbytes(int(child), "Pss", system)
            total += _added_by_descendants(int(child), system)
    return total


def _rollup_nbytes(pid: int, name: str, system: System) -> int:
    text = system.text(f"proc/{pid}/smaps_rollup") or ""  # gone, if the process has ended
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.M)
    return int(found[1]) * KiB if found else 0


def _status_nbytes(name: str, system: System) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", system.text("proc/self/status") or "", re.M)
    return int(found[1]) * KiB if found else 0
