"""The guest's hardware as QEMU arguments: its memory nodes, what the firmware says of them, disks.

Pure: it starts nothing and reads nothing, so what a mode is made of can be read here in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("numa", "cxl", "cxlperf", "disks")

# CXL windows come in steps of this size; a device that is no multiple cannot be mapped whole.
CXL_GRANULE_MIB = 256

# What the firmware tables claim about node 0, 1 and 2: relative distance from node 0, nanoseconds,
# bandwidth. Emulation has no timing, so only readers of the tables see these; they are far apart
# on purpose, for a test to tell one node from another.
DISTANCES = (10, 17, 28)
LATENCIES_NS = (100, 150, 300)
BANDWIDTHS = ("200G", "100G", "50G")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """One guest: the memory nodes its mode asks for, and their capacities."""

    mode: str
    num_cpus: int = 2
    node_mib: tuple[int, int, int] = (3072, 1024, 1024)
    """MiB of nodes 0, 1 and 2; in the CXL modes the third is the device, whatever its node id."""

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
        """Machine, CPU and memory arguments for QEMU."""
        return [*self._processor(), *_HARDWARE_OF_MODE[self.mode](self)]

    def _processor(self) -> list[str]:
        # TCG has no pcid, invpcid or tsc-deadline and would warn; with erms, glibc would copy by
        # `rep movsb`, which TCG runs a byte at a time.
        model = "Haswell-noTSX,-pcid,-invpcid,-tsc-deadline,-erms"
        if self.mode.startswith("cxl"):
            # Under a hypervisor the kernel refuses to commit a CXL region: it cannot flush caches.
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
    # The generic port takes node id 2, without memory, to carry the figures of the way from the
    # CPUs to the CXL host bridge; the kernel adds the device's own and gives its memory id 3.
    # Room for hot-plugged memory, which QEMU declares on the last node, is what keeps id 2 taken:
    # the kernel counts only nodes with a memory range, and would give 2 to the CXL device.
    hotplug_room_mib = 1024
    return [
        *("-machine", "q35,cxl=on,hmat=on"),
        *("-m", f"{_dram_mib(guest)}M,slots=1,maxmem={_dram_mib(guest) + hotplug_room_mib}M"),
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
    """One volatile type-3 device behind its own host bridge, with a window of just its size."""
    mib = guest.node_mib[2]
    return [
        *("-object", f"memory-backend-ram,id=cxlram0,share=on,size={mib}M"),
        *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl0"),
        *("-device", "cxl-rp,port=0,bus=cxl0,id=cxlport0,chassis=0,slot=2"),
        *("-device", "cxl-type3,bus=cxlport0,volatile-memdev=cxlram0,id=cxlmem0,sn=0x1"),
        *("-M", f"cxl-fmw.0.targets.0=cxl0,cxl-fmw.0.size={mib}M"),
    ]


# The NVMe drives of the guest with disks, by their serial numbers: bytes of a sector.
DRIVES = {"healthy": 512, "healthy-4kn": 4096, "bad-sectors": 512, "fragile": 512}
DRIVE_MIB = 64
# On the drive with bad sectors, in bytes: QEMU answers as a drive does that cannot read, or cannot
# write, there.
UNREADABLE = 16 << 20
UNWRITABLE = 32 << 20


def drive_args(images: Sequence[Path]) -> list[str]:
    """One NVMe drive over each file, in the order of DRIVES."""
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
