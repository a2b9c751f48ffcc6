"""Find GPUs through the NVIDIA driver or, without one, on the PCI bus."""

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
    """Return the NVIDIA GPUs. Without the driver library, their memory size is unknown (None)."""
    if system.root == Path("/"):  # the driver only knows the machine it runs on
        with open_nvml() as nvml:
            if nvml is not None:
                return _from_driver(nvml, system, nodes)
    return _from_bus(system, nodes)


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the initialized NVIDIA management library, or None if it is not available."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package with this name warns on import
            import pynvml
        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or a driver with another version
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_processes(uuid: str) -> dict[str, int]:
    """Return who else holds memory of a GPU: "process 4711 (python)" and its bytes.

    Empty if the driver's management library is not available. In a container the driver may list
    processes outside of it, whose names cannot be read.
    """
    found: dict[int, int] = {}
    with open_nvml() as nvml:
        if nvml is None:
            return {}
        try:
            card = nvml.nvmlDeviceGetHandleByUUID(uuid)
            running = [*nvml.nvmlDeviceGetComputeRunningProcesses(card)]
            running += nvml.nvmlDeviceGetGraphicsRunningProcesses(card)
        except (nvml.NVMLError, AttributeError):
            return {}
    for process in running:
        # None if the driver does not report it. Compute and graphics may list the same process.
        nbytes = int(getattr(process, "usedGpuMemory", None) or 0)
        if process.pid != os.getpid() and nbytes:
            found[process.pid] = max(nbytes, found.get(process.pid, 0))
    return {f"process {pid} ({_process_name(pid)})": nbytes for pid, nbytes in found.items()}


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "not visible here"


def own_gpu_nbytes(uuid: str) -> int | None:
    """Return what this process holds on a GPU, as the driver reports it; None if it does not.

    The process must have a CUDA context there. In a container, the driver may list processes under
    the numbers that they have outside; if it lists only one, that is the one.
    """
    with open_nvml() as nvml:
        if nvml is None:
            return None
        try:
            card = nvml.nvmlDeviceGetHandleByUUID(uuid)
            listed = nvml.nvmlDeviceGetComputeRunningProcesses(card)
        except (nvml.NVMLError, AttributeError):
            return None
    found = [each for each in listed if each.pid == os.getpid()] or listed
    nbytes = found[0].usedGpuMemory if len(found) == 1 else None
    return None if nbytes is None else int(nbytes)


def pci_gpus(system: System) -> list[str]:
    """Return the PCI addresses of NVIDIA display and 3D controllers, in bus order."""
    found = []
    for address in system.names(PCI):
        kind = system.text(f"{PCI}/{address}/class") or ""
        if system.text(f"{PCI}/{address}/vendor") == "0x10de" and kind[:6] in ("0x0300", "0x0302"):
            found.append(address)
    return found


def link_generation(text: str | None) -> int | None:
    """Return the PCIe generation for a link speed: `"32.0 GT/s PCIe"` is 5."""
    match = re.match(r"([\d.]+) GT/s", text or "")
    return _GENERATIONS.get(match[1]) if match else None


def _from_bus(system: System, nodes: Sequence[MemoryNode]) -> tuple[Gpu, ...]:
    gpus = []
    for index, address in enumerate(pci_gpus(system)):
        information = system.text(f"proc/driver/nvidia/gpus/{address}/information") or ""
        model = re.search(r"^Model:\s*(.+)$", information, re.M)
        device = system.text(f"{PCI}/{address}/device") or "(unknown model)"
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
    def query(call: str, *args: object) -> Any:
        """Call NVML and return None if this GPU does not support the query."""
        try:
            return getattr(nvml, call)(*args)
        except (nvml.NVMLError, AttributeError):
            return None

    gpus = []
    for index in range(query("nvmlDeviceGetCount") or 0):
        card = query("nvmlDeviceGetHandleByIndex", index)
        if card is None:
            continue
        pci, memory = query("nvmlDeviceGetPciInfo", card), query("nvmlDeviceGetMemoryInfo", card)
        address = _address(pci.busId) if pci else ""
        capability = query("nvmlDeviceGetCudaComputeCapability", card)
        gpus.append(
            Gpu(
                index=index,
                name=_text(query("nvmlDeviceGetName", card)),
                memory=memory.total or None if memory else None,
                free=min(memory.free, memory.total) if memory and memory.total else None,
                pcie_generation=query("nvmlDeviceGetMaxPcieLinkGeneration", card) or None,
                pcie_width=query("nvmlDeviceGetCurrPcieLinkWidth", card) or None,
                node=_nearest(system, address, nodes),
                uuid=_text(query("nvmlDeviceGetUUID", card)),
                capability=f"{capability[0]}.{capability[1]}" if capability else "",
            )
        )
    return tuple(gpus)


def _text(answer: str | bytes | None) -> str:
    """Convert an answer to str. Older bindings return bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer or ""


def _address(bus_id: str | bytes) -> str:
    """Convert the driver's `00000000:17:00.0` to the kernel's `0000:17:00.0`."""
    domain, _, rest = _text(bus_id).rstrip("\0").lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _generation(system: System, address: str) -> int | None:
    """Return the generation of the slower end of the link: the card or the port above it."""
    port = Path(os.path.realpath(system.root / PCI / address)).parent
    ends = [
        link_generation(system.text(f"{PCI}/{address}/max_link_speed")),
        link_generation(system.text(port / "max_link_speed")),
    ]
    return min((end for end in ends if end is not None), default=None)


def _width(system: System, address: str) -> int | None:
    width = system.number(f"{PCI}/{address}/current_link_width")
    return width if width is not None and 0 < width <= 32 else None  # 255 means unknown


def _nearest(system: System, address: str, nodes: Sequence[MemoryNode]) -> int | None:
    reported = system.number(f"{PCI}/{address}/numa_node") if address else None
    if reported in [node.id for node in nodes]:
        return reported
    # The kernel reports -1 if the firmware says nothing. With a single CPU node the answer is
    # clear.
    with_cpus = [node.id for node in nodes if node.cpus]
    return with_cpus[0] if len(with_cpus) == 1 else None
