"""Find CXL memory devices and the NUMA node that each one's memory belongs to.

The kernel lists the parts separately: a memory device (`mem0`), an endpoint above it with decoders,
a region made of the decoders of one or several devices, and on the region either a dax device (if
the operating system set up the memory) or plain memory blocks at its addresses (if the firmware
did).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.machine.sysfs import System

_CXL = "sys/bus/cxl/devices"
_DAX = "sys/bus/dax/devices"


@dataclass(frozen=True, kw_only=True, slots=True)
class CxlMemory:
    """A CXL memory device and the stages of its configuration as system memory."""

    device: str
    """Name in the kernel, such as `mem0`."""

    nbytes: int
    """Size of its volatile memory."""

    region: str = ""
    """Region that maps it; empty if none was created yet."""

    dax: str = ""
    """Dax device on that region; empty if there is none."""

    driver: str = ""
    """Driver of the dax device: `kmem` makes it system memory, `device_dax` a character device."""

    node: int | None = None
    """Node that its memory belongs to, or will belong to once it is online."""


def find_cxl_memory(system: System) -> tuple[CxlMemory, ...]:
    """Return every CXL memory device that has volatile memory."""
    region_of = {
        device: region
        for region in _matching(system, _CXL, r"region\d+")
        for device in _devices_of(system, region)
    }
    dax_of = {_region_below(system, dax): dax for dax in _matching(system, _DAX, r"dax[\d.]+")}
    found = []
    for device in _matching(system, _CXL, r"mem\d+"):
        nbytes = system.number(f"{_CXL}/{device}/ram/size")
        if nbytes:
            region = region_of.get(device, "")
            dax = dax_of.get(region, "") if region else ""
            found.append(
                CxlMemory(
                    device=device,
                    nbytes=nbytes,
                    region=region,
                    dax=dax,
                    driver=_link(system, f"{_DAX}/{dax}/driver") if dax else "",
                    node=_node(system, region, dax),
                )
            )
    return tuple(found)


def ram_decoder(system: System) -> str | None:
    """Return the first root decoder (an address window) that supports volatile memory."""
    for decoder in _matching(system, _CXL, r"decoder[\d.]+"):
        kind = system.text(f"{_CXL}/{decoder}/devtype")
        if kind == "cxl_decoder_root" and system.number(f"{_CXL}/{decoder}/cap_ram"):
            return decoder
    return None


def _node(system: System, region: str, dax: str) -> int | None:
    if dax:
        target = system.number(f"{_DAX}/{dax}/target_node")
        return target if target is not None and target >= 0 else None
    start = system.number(f"{_CXL}/{region}/resource") if region else None
    block = system.text("sys/devices/system/memory/block_size_bytes")  # hexadecimal, without 0x
    if start is None or not block:
        return None
    first = f"memory{start // int(block, 16)}"
    nodes = system.memory_nodes()
    return next((n for n in nodes if first in system.names(_node_directory(n))), None)


def _node_directory(node: int) -> str:
    return f"sys/devices/system/node/node{node}"


def _devices_of(system: System, region: str) -> list[str]:
    """Return a region's memory devices: from target decoder to its endpoint to the device."""
    devices = []
    for target in _matching(system, f"{_CXL}/{region}", r"target\d+"):
        decoder = system.text(f"{_CXL}/{region}/{target}")
        if decoder:
            endpoint = _real(system, f"{_CXL}/{decoder}").parent
            devices.append(_link(system, endpoint / "uport"))
    return devices


def _region_below(system: System, dax: str) -> str:
    """Return the CXL region of a dax device; empty for other memory reserved by the firmware."""
    parts = _real(system, f"{_DAX}/{dax}").parts
    return next((part for part in parts if re.fullmatch(r"region\d+", part)), "")


def _matching(system: System, directory: str, pattern: str) -> list[str]:
    return [name for name in system.names(directory) if re.fullmatch(pattern, name)]


def _real(system: System, path: str) -> Path:
    return Path(os.path.realpath(system.root / path))


def _link(system: System, path: str | Path) -> str:
    """Return the base name of a link's target; empty if there is no link."""
    try:
        return os.path.basename(os.readlink(system.root / path))
    except OSError:
        return ""
