"""What this process may do: limits, capabilities, confinement, and what it runs on. Room: show."""

from __future__ import annotations

import os
import re
import sys

from penstock import _native
from penstock.doctor.findings import Finding, fine
from penstock.machine.sysfs import System, parse_ids
from penstock.units import GiB, format_bytes

CAP_IPC_LOCK = 14
CAP_SYS_NICE = 23

_OLDEST_PYTHON = (3, 11)


def check_python(_: System) -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        return fine("python", found)
    return Finding(
        check="python",
        status="bad",
        found=found,
        why="Penstock is written for Python 3.11 and newer.",
        mend="install a newer one and make the environment anew: `python3.11 -m venv .venv`",
    )


def check_instruction_sets(_: System) -> Finding:
    try:
        chosen = _native.isa_name()
    except ValueError as unknown:
        return Finding(
            check="instruction sets",
            status="bad",
            found=str(unknown),
            why="What runs on vector instructions, the probe first, refuses to start.",
            mend="`unset PENSTOCK_ISA`, or set it to one of the names",
        )
    found = f"{', '.join(_native.isa_names())}; {chosen} in use"
    if chosen != "baseline" or os.uname().machine != "x86_64":
        return fine("instruction sets", found)
    return Finding(
        check="instruction sets",
        status="warn",
        found=found,
        why="The optimizer's sweep runs several times slower without vector instructions.",
        mend="in a virtual machine pass the host's CPU through (`qemu -cpu host`)",
    )


def check_wsl(system: System) -> Finding:
    release = system.text("proc/sys/kernel/osrelease") or "an unknown kernel"
    if "microsoft" not in release.lower():
        return fine("kernel", release)
    return Finding(
        check="kernel",
        status="warn",
        found=f"{release}: Windows Subsystem for Linux",
        why="Windows lets only part of its memory be pinned (about half), and gives the guest half "
        "of it at first; tensors beyond that are pageable, at a quarter of the copy speed.",
        mend="set `memory=` under `[wsl2]` in %UserProfile%\\.wslconfig, then `wsl --shutdown`; "
        "keep pinned budgets below half of the machine's memory",
    )


def check_sys_nice(system: System) -> Finding:
    if has_capability(system, CAP_SYS_NICE):
        return fine("sys_nice", "CAP_SYS_NICE held")
    return Finding(
        check="sys_nice",
        status="note",
        found="no CAP_SYS_NICE",
        why="A process may place and move its own memory without it, but Docker's default filter "
        "refuses mbind and move_pages to containers that lack it (see binding).",
        mend="only if binding fails: `docker run --cap-add SYS_NICE ...`",
    )


def check_memlock(system: System) -> Finding:
    may_lock = has_capability(system, CAP_IPC_LOCK)
    if may_lock and not in_user_namespace(system):
        return fine("memlock", "no limit (CAP_IPC_LOCK held)")
    limits = system.text("proc/self/limits") or ""
    match = re.search(r"^Max locked memory\s+(\S+)", limits, re.M)
    if match is None or match[1] == "unlimited":
        return fine("memlock", "no limit")
    # The kernel asks for the capability in the first user namespace, whatever is held in others.
    void = "; CAP_IPC_LOCK of a user namespace does not lift that" if may_lock else ""
    return Finding(
        check="memlock",
        status="warn",
        found=f"{format_bytes(int(match[1]))} may be locked{void}",
        why="Without a GPU pinned=True locks memory and falls back to pageable beyond the limit; "
        "io_uring's registered buffers count against it too.",
        mend="`ulimit -l unlimited` as root, or `* - memlock unlimited` in "
        "/etc/security/limits.conf and a new login; `docker run --ulimit memlock=-1 ...`",
    )


def check_cpuset(system: System) -> Finding:
    nodes, allowed = system.memory_nodes(), system.allowed_nodes()
    online = system.ids("sys/devices/system/cpu/online")
    cpus = parse_ids(_status(system, "Cpus_allowed_list"))
    kept_nodes, kept_cpus = set(nodes) - set(allowed), set(online) - set(cpus) if cpus else set()
    if not kept_nodes and not kept_cpus:
        return fine("cpuset", "every node and CPU may be used")
    found = f"{len(allowed)} of {len(nodes)} nodes, {len(cpus)} of {len(online)} CPUs may be used"
    return Finding(
        check="cpuset",
        status="warn" if kept_nodes else "note",
        found=found,
        why="Memory on the other nodes cannot be placed on, and the sweep has fewer cores.",
        mend="widen cpuset.mems and cpuset.cpus of the control group, drop `numactl` or `taskset` "
        "from the command, or `docker run --cpuset-mems= --cpuset-cpus= ...`",
    )


def check_memory_limit(system: System) -> Finding:
    limit = system.memory_limit()
    total = sum(system.node_bytes(node).total for node in system.memory_nodes())
    if limit is None or limit[0] >= total:
        return fine("memory limit", "no control group limits memory below the machine's")
    most, left = limit
    found = f"{format_bytes(most)} of {format_bytes(total)}, {format_bytes(left)} left"
    return Finding(
        check="memory limit",
        status="warn" if left < GiB else "note",
        found=found,
        why="The kernel kills the process beyond it; plans must stay below what is left.",
        mend="raise memory.max (`docker run --memory=...`, `systemd-run -p MemoryMax=...`), or "
        "give budgets that fit",
    )


def has_capability(system: System, bit: int) -> bool:
    return bool(int(_status(system, "CapEff") or "0", 16) >> bit & 1)


def in_user_namespace(system: System) -> bool:
    """Whether this is another than the first, which alone maps every user to itself."""
    text = system.text("proc/self/uid_map")
    return text is not None and text.split() != ["0", "0", "4294967295"]


def _status(system: System, key: str) -> str:
    match = re.search(rf"^{key}:\s*(\S+)", system.text("proc/self/status") or "", re.M)
    return match[1] if match else ""
