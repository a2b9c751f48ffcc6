"""Discover this machine from the kernel's files. Nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from penstock.machine.discovery.cxl import CxlMemory, find_cxl_memory
from penstock.machine.discovery.gpu_links import find_gpu_links
from penstock.machine.discovery.gpus import find_gpus
from penstock.machine.discovery.nics import find_nics
from penstock.machine.discovery.nodes import find_nodes
from penstock.machine.discovery.storage import find_storage
from penstock.machine.limits import memory_limit_for_process
from penstock.machine.machine import Cpu, Machine, Provenance
from penstock.machine.sysfs import System
from penstock.version import __version__

__all__ = ["CxlMemory", "discover", "find_cxl_memory"]

HERE = System()

_ISAS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16",
    "amx_bf16", "asimd", "bf16", "sve", "sve2", "svebf16",
)  # fmt: skip


def discover(system: System = HERE, storage: Sequence[Path | str] = ()) -> Machine:
    """Describe this machine and the given storage paths as the kernel reports them."""
    nodes = find_nodes(system)
    limit = memory_limit_for_process(system)
    if limit is not None and limit.nbytes >= sum(node.capacity for node in nodes):
        limit = None
    return Machine(
        name=system.text("proc/sys/kernel/hostname") or "",
        made=Provenance(
            by=f"penstock {__version__}",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            kernel=system.text("proc/sys/kernel/osrelease") or "",
        ),
        cpu=_find_cpu(system),
        nodes=nodes,
        gpus=find_gpus(system, nodes),
        gpu_links=find_gpu_links(system),
        nics=find_nics(system, nodes),
        storage=tuple(find_storage(system, path) for path in storage),
        memory_limit=limit,
    )


def _find_cpu(system: System) -> Cpu:
    text = system.text("proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    has = set(flags[1].split()) if flags else set()
    threads = len(re.findall(r"^processor\s*:", text, re.M))
    return Cpu(
        model=model[1].strip() if model else "",
        cores=_count_cores(system) or threads or None,
        isas=tuple(isa for isa in _ISAS if isa in has),
    )


def _count_cores(system: System) -> int:
    """Count physical cores: the hardware threads of a core list the same siblings."""
    cpus = [n for n in system.names("sys/devices/system/cpu") if re.fullmatch(r"cpu\d+", n)]
    path = "sys/devices/system/cpu/{}/topology/thread_siblings_list"
    return len({siblings for cpu in cpus if (siblings := system.text(path.format(cpu)))})
