"""Checks of the process: Python, instruction sets, kernel, capabilities and limits."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

from penstock import _native
from penstock.doctor.findings import Finding, ok
from penstock.machine.limits import cpu_quota, memory_limit, usable_threads
from penstock.machine.sysfs import System, parse_ids
from penstock.units import GiB, format_bytes

CAP_IPC_LOCK = 14
CAP_SYS_NICE = 23

_OLDEST_PYTHON = (3, 11)


def check_python(_: System) -> Finding:
    """Check the version of Python."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= _OLDEST_PYTHON:
        return ok("python", found)
    return Finding(
        check="python",
        status="bad",
        found=found,
        why="Penstock requires Python 3.11 or newer.",
        fix="install a newer Python and create a new environment: `python3.11 -m venv .venv`",
    )


def check_byte_code(_: System) -> Finding:
    """Check that Python does not compile torch's and transformers' modules at every start."""
    origins = {name: _origin(name) for name in _LARGE_PACKAGES}
    sources = {name: origin for name, origin in origins.items() if origin}
    missing = [name for name, origin in sources.items() if not _byte_code(origin).exists()]
    if not missing:
        return ok("byte code", f"compiled modules of {' and '.join(sources) or 'no package'}")
    names, folder = " and ".join(missing), Path(sources[missing[0]]).parents[1]
    never = ", and PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else ""
    return Finding(
        check="byte code",
        status="note",
        found=f"no compiled modules of {names}{never}",
        why="Unless it can write them, Python compiles thousands of modules at every start, which "
        "takes 5 to 10 s.",
        fix=f"`python -m compileall -q -j 0 {folder}` as the owner of that directory",
    )


_LARGE_PACKAGES = ("torch", "transformers")


def _origin(name: str) -> str | None:
    """Return the file of a package, without importing it."""
    spec = importlib.util.find_spec(name)
    return spec.origin if spec is not None else None


def _byte_code(source: str) -> Path:
    """Return the file in which Python keeps the compiled form of a module."""
    return Path(importlib.util.cache_from_source(source))


def check_instruction_sets(_: System) -> Finding:
    """Check which vector instructions the native core uses."""
    try:
        chosen = _native.isa_name()
    except ValueError as error:
        return Finding(
            check="instruction sets",
            status="bad",
            found=str(error),
            why="The probe and the optimizer refuse to start with an unknown instruction set.",
            fix="`unset PENSTOCK_ISA`, or set it to one of the listed names",
        )
    found = f"{', '.join(_native.isa_names())}; {chosen} in use"
    if chosen != "baseline" or os.uname().machine != "x86_64":
        return ok("instruction sets", found)
    return Finding(
        check="instruction sets",
        status="warn",
        found=found,
        why="The optimizer sweep is several times slower without vector instructions.",
        fix="in a virtual machine, pass through the host's CPU (`qemu -cpu host`)",
    )


def check_wsl(system: System) -> Finding:
    """Check whether the kernel is the Windows Subsystem for Linux."""
    release = system.text("proc/sys/kernel/osrelease") or "an unknown kernel"
    if "microsoft" not in release.lower():
        return ok("kernel", release)
    return Finding(
        check="kernel",
        status="warn",
        found=f"{release}: Windows Subsystem for Linux",
        why="Windows gives the guest half of its memory by default and allows about half of it to "
        "be pinned; tensors beyond that are pageable and copy at a quarter of the speed.",
        fix="set `memory=` under `[wsl2]` in %UserProfile%\\.wslconfig, then `wsl --shutdown`; "
        "keep pinned budgets below half of the machine's memory",
    )


def check_sys_nice(system: System) -> Finding:
    """Check for CAP_SYS_NICE."""
    if has_capability(system, CAP_SYS_NICE):
        return ok("sys_nice", "CAP_SYS_NICE is available")
    return Finding(
        check="sys_nice",
        status="note",
        found="no CAP_SYS_NICE",
        why="A process can place and move its own memory without it, but Docker's default seccomp "
        "profile denies mbind and move_pages to containers that lack it (see `binding`).",
        fix="only if the check `binding` fails: `docker run --cap-add SYS_NICE ...`",
    )


def check_memlock(system: System) -> Finding:
    """Check the limit on locked memory."""
    may_lock = has_capability(system, CAP_IPC_LOCK)
    if may_lock and not in_user_namespace(system):
        return ok("memlock", "no limit (CAP_IPC_LOCK is available)")
    limits = system.text("proc/self/limits") or ""
    match = re.search(r"^Max locked memory\s+(\S+)", limits, re.M)
    if match is None or match[1] == "unlimited":
        return ok("memlock", "no limit")
    # The kernel checks for the capability in the initial user namespace only.
    note = "; CAP_IPC_LOCK in a user namespace does not lift the limit" if may_lock else ""
    return Finding(
        check="memlock",
        status="warn",
        found=f"{format_bytes(int(match[1]))} may be locked{note}",
        why="Without a GPU, pinned=True locks memory and falls back to pageable memory beyond the "
        "limit; registered buffers of io_uring also count against it.",
        fix="`ulimit -l unlimited` as root, or `* - memlock unlimited` in "
        "/etc/security/limits.conf and log in again; in a container `docker run --ulimit "
        "memlock=-1 ...`",
    )


def check_cpuset(system: System) -> Finding:
    """Check whether the process is confined to some nodes or CPUs."""
    nodes, allowed = system.memory_nodes(), system.allowed_nodes()
    online = system.ids("sys/devices/system/cpu/online")
    cpus = parse_ids(_status(system, "Cpus_allowed_list"))
    denied_nodes = set(nodes) - set(allowed)
    denied_cpus = set(online) - set(cpus) if cpus else set()
    if not denied_nodes and not denied_cpus:
        return ok("cpuset", "all nodes and CPUs may be used")
    found = f"{len(allowed)} of {len(nodes)} nodes, {len(cpus)} of {len(online)} CPUs may be used"
    return Finding(
        check="cpuset",
        status="warn" if denied_nodes else "note",
        found=found,
        why="Tensors cannot be placed on the other nodes, and the optimizer sweep has fewer cores.",
        fix="extend cpuset.mems and cpuset.cpus of the control group, remove `numactl` or "
        "`taskset` from the command, or `docker run --cpuset-mems= --cpuset-cpus= ...`",
    )


def check_memory_limit(system: System) -> Finding:
    """Check for a control group or a resource limit that limits memory."""
    limit = memory_limit(system)
    total = sum(system.node_bytes(node).total for node in system.memory_nodes())
    if limit is None or limit.nbytes >= total:
        return ok("memory limit", "no limit below the memory of the machine")
    found = (
        f"{format_bytes(limit.nbytes)} of {format_bytes(total)} ({limit.name}), "
        f"{format_bytes(limit.left)} left"
    )
    return Finding(
        check="memory limit",
        status="warn" if limit.left < GiB else "note",
        found=found,
        why="The kernel kills a process that exceeds the limit of its control group, so `auto` "
        "budgets stay below it, and larger budgets are refused.",
        fix="raise the limit (`docker run --memory=...`, `systemd-run -p MemoryMax=...`, Slurm's "
        "`--mem=...`, Kubernetes' `resources.limits.memory`, `ulimit -v unlimited`), or choose "
        "smaller budgets",
    )


def check_cpu_quota(system: System) -> Finding:
    """Check for a control group that limits CPU time."""
    quota, cpus = cpu_quota(system), usable_threads(system)
    if quota is None or quota >= len(os.sched_getaffinity(0)):
        return ok("cpu quota", "no control group limits CPU time")
    return Finding(
        check="cpu quota",
        status="note",
        found=f"the time of {quota:g} CPUs, of {len(os.sched_getaffinity(0))}",
        why=f"The optimizer sweep uses {cpus} threads. The kernel stops more threads than that "
        "for part of the time.",
        fix="raise cpu.max (`docker run --cpus=...`, `systemd-run -p CPUQuota=...`)",
    )


def has_capability(system: System, bit: int) -> bool:
    """Return whether the process has the effective capability with this number."""
    return bool(int(_status(system, "CapEff") or "0", 16) >> bit & 1)


def in_user_namespace(system: System) -> bool:
    """Return whether this is not the initial user namespace, which maps every user to itself."""
    text = system.text("proc/self/uid_map")
    return text is not None and text.split() != ["0", "0", "4294967295"]


def _status(system: System, key: str) -> str:
    match = re.search(rf"^{key}:\s*(\S+)", system.text("proc/self/status") or "", re.M)
    return match[1] if match else ""
