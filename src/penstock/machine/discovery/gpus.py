"""GPUs, from the driver where there is one, else from the PCI bus. Room: measure."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.machine.machine import Gpu, MemoryNode
from penstock.machine.sysfs import System

PCI = "sys/bus/pci/devices"

_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s per lane


def find_gpus(system: System, nodes: Sequence[MemoryNode]) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs. Without the driver's library their memory is unknown, not zero."""
    if system.root == Path("/"):  # the driver knows only the machine we are on
        with open_nvml() as nvml:
            if nvml is not None:
                return _from_driver(nvml, system, nodes)
    return _from_bus(system, nodes)


@contextmanager
def open_nvml() -> Iterator[Any]:
    """The driver's management library, ready for use, or None: its absence is an answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package of that name warns when imported
            import pynvml
        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or a driver of another version
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def pci_gpus(system: System) -> list[str]:
    """PCI addresses of NVIDIA display and 3D controllers, in bus order."""
    found = []
    for address in system.names(PCI):
        kind = system.text(f"{PCI}/{address}/class") or ""
        if system.text(f"{PCI}/{address}/vendor") == "0x10de" and kind[:6] in ("0x0300", "0x0302"):
            found.append(address)
    return found


def link_generation(text: str | None) -> int | None:
    """`"32.0 GT/s PCIe"` is generation 5."""
    match = re.match(r"([\d.]+) GT/s", text or "")
    return _GENERATIONS.get(match[1]) if match else None


def _from_bus(system: System, nodes: Sequence[MemoryNode]) -> tuple[Gpu, ...]:
    gpus = []
    for index, address in enumerate(pci_gpus(system)):
        told = system.text(f"proc/driver/nvidia/gpus/{address}/information") or ""
        model = re.search(r"^Model:\s*(.+)$", told, re.M)
        device = system.text(f"{PCI}/{address}/device") or "of unknown model"
        gpus.append(
            Gpu(
                index=index,
                name=model[1].strip() if model else f"NVIDIA {device}",
                pcie_generation=_generation(system, address),
                pcie_width=_width(system, address),
                node=_nearest(system, address, nodes),
            )
        )
    return tuple(gpus)


def _from_driver(nvml: Any, system: System, nodes: Sequence[MemoryNode]) -> tuple[Gpu, ...]:
    def ask(call: str, *args: object) -> Any:
        """Each may be unsupported on one card or another."""
        try:
            return getattr(nvml, call)(*args)
        except (nvml.NVMLError, AttributeError):
            return None

    gpus = []
    for index in range(ask("nvmlDeviceGetCount") or 0):
        card = ask("nvmlDeviceGetHandleByIndex", index)
        if card is None:
            continue
        pci, memory = ask("nvmlDeviceGetPciInfo", card), ask("nvmlDeviceGetMemoryInfo", card)
        address = _address(pci.busId) if pci else ""
        capability = ask("nvmlDeviceGetCudaComputeCapability", card)
        gpus.append(
            Gpu(
                index=index,
                name=_text(ask("nvmlDeviceGetName", card)),
                memory=memory.total or None if memory else None,
                free=min(memory.free, memory.total) if memory and memory.total else None,
                pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", card) or None,
                pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", card) or None,
                node=_nearest(system, address, nodes),
                uuid=_text(ask("nvmlDeviceGetUUID", card)),
                capability=f"{capability[0]}.{capability[1]}" if capability else "",
            )
        )
    return tuple(gpus)


def _text(answer: str | bytes | None) -> str:
    """Older bindings give bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer or ""


def _address(bus_id: str | bytes) -> str:
    """The driver writes `00000000:17:00.0` where the kernel writes `0000:17:00.0`."""
    domain, _, rest = _text(bus_id).rstrip("\0").lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _generation(system: System, address: str) -> int | None:
    """A link runs no faster than the slower of its two ends: the card and the port above it."""
    port = Path(os.path.realpath(system.root / PCI / address)).parent
    ends = [
        link_generation(system.text(f"{PCI}/{address}/max_link_speed")),
        link_generation(system.text(port / "max_link_speed")),
    ]
    return min((end for end in ends if end is not None), default=None)


def _width(system: System, address: str) -> int | None:
    width = system.number(f"{PCI}/{address}/current_link_width")
    return width if width is not None and 0 < width <= 32 else None  # 255: the kernel cannot tell


def _nearest(system: System, address: str, nodes: Sequence[MemoryNode]) -> int | None:
    told = system.number(f"{PCI}/{address}/numa_node") if address else None
    if told in [node.id for node in nodes]:
        return told
    # The kernel says -1 where the firmware is silent; with one node of CPUs there is no doubt.
    with_cpus = [node.id for node in nodes if node.cpus]
    return with_cpus[0] if len(with_cpus) == 1 else None
