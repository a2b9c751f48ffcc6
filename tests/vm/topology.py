"""QEMU arguments for the guest's hardware: memory nodes, firmware tables and disks.

This module starts nothing and reads no files. It defines the hardware of each mode in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("numa", "cxl", "cxlperf", "disks")

# The size of a CXL window is a multiple of this; other devices cannot be mapped completely.
CXL_GRANULE_MIB = 256

# Values of nodes 0, 1 and 2 in the firmware tables: distance from node 0, latency and bandwidth.
# They do not affect the emulation. They differ a lot, so that a test can tell the nodes apart.
DISTANCES = (10, 17, 28)
LATENCIES_NS = (100, 150, 300)
BANDWIDTHS = ("200G", "100G", "50G")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """A guest: its mode, CPUs and memory."""

    mode: str
    num_cpus: int = 2
    node_mib: tuple[int, int, int] = (3072, 1024, 1024)
    """MiB of nodes 0, 1 and 2. In the CXL modes the third value is the size of the device."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.num_cpus < 1:
            raise ValueError(f"the guest needs at least 1 CPU, got {self.num_cpus}")
        if min(self.node_mib) < 1:
            raise ValueError(f"every node needs memory, got {self.node_mib} MiB")
        if self.mode.startswith("cxl") and self.node_mib[2] % CXL_GRANULE_MIB:
            raise ValueError(
                f"CXL memory must be a multiple of {CXL_GRANULE_MIB} MiB, got {self.node_mib[2]}"
            )

    @property
    def qemu_args(self) -> list[str]:
        """Return the machine, CPU and memory arguments for QEMU."""
        return [*self._processor(), *_HARDWARE_OF_MODE[self.mode](self)]

    def _processor(self) -> list[str]:
        # TCG does not support pcid, invpcid and tsc-deadline, and would warn. With erms, glibc
        # would copy with `rep movsb`, which TCG executes byte by byte.
        model = "Haswell-noTSX,-pcid,-invpcid,-tsc-deadline,-erms"
        if self.mode.startswith("cxl"):
            # Under a hypervisor the kernel cannot flush caches and refuses to commit a CXL region.
            model += ",-hypervisor"
        return ["-cpu", model, "-smp", str(self.num_cpus)]


def _numa_hardware(guest: Guest) -> list[str]:
    return [
        *("-machine", "q35,hmat=on", "-m", f"{sum(guest.node_mib)}M"),
        *_cpu_node(guest),
        *_memory_only_node(guest, 1, "initiator=0"),
        *_memory_only_node(guest, 2, "initiator=0"),
        *_distances(),
        *_performance(),
    ]


def _disks_hardware(guest: Guest) -> list[str]:
    return ["-machine", "q35", "-m", f"{sum(guest.node_mib)}M"]


def _cxl_hardware(guest: Guest) -> list[str]:
    return [
        *("-machine", "q35,cxl=on", "-m", f"{_dram_mib(guest)}M"),
        *_cpu_node(guest),
        *_memory_only_node(guest, 1),
        *_cxl_device(guest),
    ]


def _cxlperf_hardware(guest: Guest) -> list[str]:
    # The generic port occupies node id 2, without memory, and carries the performance of the path
    # from the CPUs to the CXL host bridge. The kernel adds that of the device and gives its memory
    # id 3. QEMU declares space for hot-plugged memory on the last node, and this keeps id 2
    # occupied: the kernel counts only nodes with a memory range, and would otherwise give id 2 to
    # the CXL device.
    hotplug_mib = 1024
    return [
        *("-machine", "q35,cxl=on,hmat=on"),
        *("-m", f"{_dram_mib(guest)}M,slots=1,maxmem={_dram_mib(guest) + hotplug_mib}M"),
        *_cpu_node(guest),
        *_memory_only_node(guest, 1, "initiator=0"),
        *("-numa", "node,nodeid=2,initiator=0"),
        *_distances(),
        *_performance(),
        *_cxl_device(guest),
        *("-object", "acpi-generic-port,id=port0,pci-bus=cxl0,node=2"),
    ]


_HARDWARE_OF_MODE = {
    "numa": _numa_hardware,
    "cxl": _cxl_hardware,
    "cxlperf": _cxlperf_hardware,
    "disks": _disks_hardware,
}


def _dram_mib(guest: Guest) -> int:
    return guest.node_mib[0] + guest.node_mib[1]


def _cpu_node(guest: Guest) -> list[str]:
    return [
        *("-object", f"memory-backend-ram,id=ram0,size={guest.node_mib[0]}M"),
        *("-numa", f"node,nodeid=0,cpus=0-{guest.num_cpus - 1},memdev=ram0"),
    ]


def _memory_only_node(guest: Guest, node: int, *properties: str) -> list[str]:
    return [
        *("-object", f"memory-backend-ram,id=ram{node},size={guest.node_mib[node]}M"),
        *("-numa", ",".join([f"node,nodeid={node},memdev=ram{node}", *properties])),
    ]


def _distances() -> list[str]:
    args = []
    for near, far in ((0, 1), (0, 2), (1, 2)):
        args += ["-numa", f"dist,src={near},dst={far},val={DISTANCES[far]}"]
    return args


def _performance() -> list[str]:
    args = []
    for node, (latency_ns, bandwidth) in enumerate(zip(LATENCIES_NS, BANDWIDTHS, strict=True)):
        entry = f"hmat-lb,initiator=0,target={node},hierarchy=memory"
        args += ["-numa", f"{entry},data-type=access-latency,latency={latency_ns}"]
        args += ["-numa", f"{entry},data-type=access-bandwidth,bandwidth={bandwidth}"]
    return args


def _cxl_device(guest: Guest) -> list[str]:
    """Return a volatile type-3 device behind its own host bridge, with a window of its size."""
    mib = guest.node_mib[2]
    return [
        *("-object", f"memory-backend-ram,id=cxlram0,share=on,size={mib}M"),
        *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl0"),
        *("-device", "cxl-rp,port=0,bus=cxl0,id=cxlport0,chassis=0,slot=2"),
        *("-device", "cxl-type3,bus=cxlport0,volatile-memdev=cxlram0,id=cxlmem0,sn=0x1"),
        *("-M", f"cxl-fmw.0.targets.0=cxl0,cxl-fmw.0.size={mib}M"),
    ]


# Sector size in bytes of each NVMe drive of the guest with disks, by serial number.
DRIVES = {"healthy": 512, "healthy-4kn": 4096, "bad-sectors": 512, "fragile": 512}
DRIVE_MIB = 64
# Offsets in bytes on the drive `bad-sectors` at which QEMU fails reads or writes.
UNREADABLE = 16 << 20
UNWRITABLE = 32 << 20


def drive_args(images: Sequence[Path]) -> list[str]:
    """Return an NVMe drive for each file, in the order of DRIVES."""
    args = []
    for (serial, sector), image in zip(DRIVES.items(), images, strict=True):
        options = {"driver": "raw", "node-name": serial, "file.driver": "file"}
        options["file.filename"] = str(image)
        if serial == "bad-sectors":
            options = {f"image.{key}": value for key, value in options.items()}
            options |= {"driver": "blkdebug", "node-name": serial, "image.node-name": "under"}
            for number, (kind, at) in enumerate((("read", UNREADABLE), ("write", UNWRITABLE))):
                rule = {"event": "none", "iotype": kind, "errno": "5", "sector": str(at // 512)}
                options |= {f"inject-error.{number}.{k}": v for k, v in rule.items()}
        text = ",".join(f"{key}={value.replace(',', ',,')}" for key, value in options.items())
        blocks = f"logical_block_size={sector},physical_block_size={max(sector, 4096)}"
        args += ["-blockdev", text, "-device", f"nvme,drive={serial},serial={serial},{blocks}"]
    return args
