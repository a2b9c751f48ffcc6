"""Discovery reads a machine from the kernel files (the listings in fixtures/ are real)."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.machine.discovery import discover
from penstock.machine.discovery.cxl import CxlMemory, find_cxl_memory, ram_decoder
from penstock.machine.discovery.gpus import find_gpus, link_generation, open_nvml
from penstock.machine.discovery.storage import find_storage
from penstock.machine.machine import Gpu, Machine, MemoryNode
from penstock.machine.sysfs import System
from penstock.records import from_json, parse
from penstock.units import GiB, KiB
from tests.support.fake_sysfs import fake_root

NODE = "sys/devices/system/node"


def kinds(system: System) -> dict[int, str]:
    return {node.id: node.kind for node in discover(system).nodes}


def test_nodes_without_cpus_are_cxl_and_have_firmware_figures(tmp_path: Path) -> None:
    machine = discover(fake_root(tmp_path, "numa"))
    assert {node.id: node.kind for node in machine.nodes} == {0: "dram", 1: "cxl", 2: "cxl"}
    far = machine.node(2)
    assert far.distances == {0: 28, 1: 28, 2: 10}
    assert far.capacity == 992968 * KiB
    assert far.cpus == ()
    assert far.devices == ()
    assert far.firmware is not None
    assert far.firmware.read_bandwidth == 51200e6
    assert far.firmware.write_latency == 300e-9
    assert machine.node(0).cpus == (0, 1)


def test_a_cxl_device_is_found_on_its_node_if_node_ids_have_gaps(tmp_path: Path) -> None:
    machine = discover(fake_root(tmp_path, "cxl_cdat"))
    assert [node.id for node in machine.nodes] == [0, 1, 3]
    card = machine.node(3)
    assert (card.kind, card.devices, card.capacity) == ("cxl", ("mem0",), GiB)
    assert card.distances == {0: 20, 1: 20, 3: 10}
    assert card.firmware is not None
    assert card.firmware.read_bandwidth == 16e9
    assert machine.node(1).devices == ()


def test_a_node_without_firmware_data_has_no_firmware_figures(tmp_path: Path) -> None:
    machine = discover(fake_root(tmp_path, "cxl"))
    assert machine.node(2).firmware is None
    assert machine.node(2).devices == ("mem0",)


def test_memory_without_cpus_that_is_faster_than_dram_is_dram(tmp_path: Path) -> None:
    """Xeon Max in flat mode presents its on-package HBM this way."""
    faster = {
        f"{NODE}/node1/{access}/initiators/read_bandwidth": "800000"
        for access in ("access0", "access1")
    }
    assert kinds(fake_root(tmp_path, "numa", changes=faster)) == {0: "dram", 1: "dram", 2: "cxl"}


def test_memory_that_the_kernel_ranks_above_dram_is_dram(tmp_path: Path) -> None:
    tiers = "sys/devices/virtual/memory_tiering"
    changes = {f"{tiers}/memory_tier4/nodelist": "0", f"{tiers}/memory_tier2/nodelist": "1"}
    assert kinds(fake_root(tmp_path, "cxl", changes=changes))[1] == "dram"


def test_memory_without_cpus_that_the_kernel_ranks_with_dram_is_cxl(tmp_path: Path) -> None:
    assert kinds(fake_root(tmp_path, "cxl")) == {0: "dram", 1: "cxl", 2: "cxl"}


def test_memory_on_the_cxl_bus_is_cxl_regardless_of_its_firmware(tmp_path: Path) -> None:
    exaggerated = {
        f"{NODE}/node3/{access}/initiators/read_bandwidth": "900000"
        for access in ("access0", "access1")
    }
    assert kinds(fake_root(tmp_path, "cxl_cdat", changes=exaggerated))[3] == "cxl"


def test_firmware_figures_for_cpus_are_preferred(tmp_path: Path) -> None:
    seen_by_a_gpu = {f"{NODE}/node1/access0/initiators/read_bandwidth": "999999"}
    machine = discover(fake_root(tmp_path, "numa", changes=seen_by_a_gpu))
    assert machine.node(1).firmware is not None
    assert machine.node(1).firmware.read_bandwidth == 102400e6


def test_gpu_memory_that_is_a_node_is_not_a_memory_node(tmp_path: Path) -> None:
    status = {"proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node:    1\nStatus:  online"}
    machine = discover(fake_root(tmp_path, "numa", changes=status))
    assert [node.id for node in machine.nodes] == [0, 2]
    assert machine.node(0).distances == {0: 10, 2: 28}


def test_distances_to_nodes_without_memory_are_left_out(tmp_path: Path) -> None:
    machine = discover(fake_root(tmp_path, "numa", changes={f"{NODE}/has_memory": "0,2"}))
    assert machine.node(0).distances == {0: 10, 2: 28}


def test_a_cxl_device_reports_how_far_it_is_configured(tmp_path: Path) -> None:
    device = {"device": "mem0", "nbytes": GiB}
    system = fake_root(tmp_path / "online", "cxl")
    online = CxlMemory(**device, region="region0", dax="dax0.0", driver="kmem", node=2)
    assert find_cxl_memory(system) == (online,)
    assert ram_decoder(system) == "decoder0.0"

    no_dax = {f"sys/bus/dax/devices/dax0.0{rest}": None for rest in ("", "/driver", "/target_node")}
    system = fake_root(tmp_path / "region", "cxl", changes=no_dax)
    assert find_cxl_memory(system) == (CxlMemory(**device, region="region0"),)

    no_region = {f"sys/bus/cxl/devices/region0/{file}": None for file in ("target0", "resource")}
    system = fake_root(tmp_path / "bare", "cxl", changes={**no_dax, **no_region})
    assert find_cxl_memory(system) == (CxlMemory(**device),)


def test_memory_reserved_by_the_firmware_is_not_an_idle_cxl_device(
    tmp_path: Path,
) -> None:
    changes: dict[str, str | None] = {
        f"sys/bus/dax/devices/dax0.0{rest}": None for rest in ("", "/driver", "/target_node")
    }
    changes |= {f"sys/bus/cxl/devices/region0/{file}": None for file in ("target0", "resource")}
    changes["sys/bus/dax/devices/dax1.0"] = "-> ../../../devices/platform/hmem.0/dax1.0"
    changes["sys/bus/dax/devices/dax1.0/target_node"] = "1"
    system = fake_root(tmp_path, "cxl", changes=changes)
    assert find_cxl_memory(system) == (CxlMemory(device="mem0", nbytes=GiB),)


def test_cxl_memory_set_up_by_the_firmware_is_found_by_its_address(tmp_path: Path) -> None:
    no_dax = {f"sys/bus/dax/devices/dax0.0{rest}": None for rest in ("", "/driver", "/target_node")}
    block = 0x190000000 // 0x8000000
    online = {f"{NODE}/node2/memory{block}/state": "online"}
    system = fake_root(tmp_path, "cxl", changes={**no_dax, **online})
    assert find_cxl_memory(system)[0].node == 2


def test_a_kernel_without_numa_has_one_node_with_everything(tmp_path: Path) -> None:
    changes = {"proc/meminfo": "MemTotal:  1024 kB\nMemFree:  512 kB"}
    machine = discover(fake_root(tmp_path, changes=changes))
    (node,) = machine.nodes
    assert (node.id, node.kind, node.capacity, node.free) == (0, "dram", 1024 * KiB, 512 * KiB)


def test_the_processor_counts_cores_and_not_threads(tmp_path: Path) -> None:
    cpu = discover(fake_root(tmp_path, "healthy")).cpu
    assert (cpu.model, cpu.cores) == ("Some Processor 9000", 1)
    assert cpu.isas == ("avx2", "fma", "f16c", "avx512f")


def test_a_gpu_without_its_driver_is_read_from_the_bus(tmp_path: Path) -> None:
    machine = discover(fake_root(tmp_path, "healthy"))
    # The port above the card is one generation slower than the card. The network card is not a GPU.
    expected = Gpu(index=0, name="NVIDIA 0x2330", pcie_generation=4, pcie_width=16, node=0)
    assert machine.gpus == (expected,)


def test_a_gpu_has_no_node_if_the_kernel_does_not_report_it(tmp_path: Path) -> None:
    changes: dict[str, str | None] = {
        f"{NODE}/node1/cpulist": "2-3", f"{NODE}/has_memory": "0-1", "proc/self/status": None,
    }  # fmt: skip
    machine = discover(fake_root(tmp_path, "healthy", "numa", changes=changes))
    assert machine.gpus[0].node is None


@pytest.mark.parametrize(
    ("text", "generation"),
    [("32.0 GT/s PCIe", 5), ("2.5 GT/s", 1), ("Unknown", None), (None, None)],
)
def test_link_speeds_map_to_generations(text: str | None, generation: int | None) -> None:
    assert link_generation(text) == generation


class FakeNvml:
    """A driver with two GPUs. The second only answers the query for its name."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.shut = False

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut = True

    def __getattr__(self, call: str) -> object:
        memory = SimpleNamespace(total=80 * GiB, free=79 * GiB)
        first = {
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:17:00.0"),
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetName": b"Card",
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetUUID": "GPU-1",
        }

        def answer(*args: int) -> object:
            if call == "nvmlDeviceGetCount":
                return 2
            if call == "nvmlDeviceGetHandleByIndex":
                return args[0]
            if args == (0,):
                return first[call]
            if call == "nvmlDeviceGetName":
                return "Other"
            raise self.NVMLError(call)

        return answer


def test_gpu_fields_that_the_driver_does_not_support_stay_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    nodes = tuple(MemoryNode(id=n, kind="dram", capacity=1, cpus=(n,)) for n in (0, 1))
    first, second = find_gpus(System(), nodes)
    assert first == Gpu(
        index=0, name="Card", memory=80 * GiB, free=79 * GiB, pcie_generation=5, pcie_width=16,
        uuid="GPU-1", capability="9.0",
    )  # fmt: skip
    assert second == Gpu(index=1, name="Other")
    assert nvml.shut


def test_open_nvml_yields_none_without_the_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with open_nvml() as nvml:
        assert nvml is None


def test_a_directory_on_a_partition_is_described_by_its_disk(tmp_path: Path) -> None:
    system = fake_root(tmp_path, "healthy")
    (tmp_path / "data").mkdir()
    storage = find_storage(system, "/data")
    assert (storage.path, storage.device) == ("/data", "/dev/nvme0n1p2")
    assert (storage.model, storage.file_system) == ("FAST 7000 PRO", "ext4")
    assert (storage.block, storage.rotational) == (512, False)
    assert storage.free is not None
    assert storage.capacity is not None
    assert 0 < storage.free <= storage.capacity


def test_a_missing_directory_is_described_by_its_parent(tmp_path: Path) -> None:
    storage = find_storage(fake_root(tmp_path, "healthy"), "/scratch disk/a/b/c")
    assert (storage.path, storage.file_system) == ("/scratch disk/a/b/c", "btrfs")
    assert (storage.device, storage.model) == ("/dev/sda", "SPINNING RUST")
    assert storage.rotational
    assert not (tmp_path / "scratch disk").exists()


def test_a_raw_device_is_described_with_its_total_size(tmp_path: Path) -> None:
    storage = find_storage(fake_root(tmp_path, "healthy"), "/dev/nvme1n1")
    assert (storage.device, storage.file_system, storage.block) == ("/dev/nvme1n1", "", 4096)
    assert storage.capacity == storage.free == 2048 * 512
    assert (storage.model, storage.rotational) == ("LARGE BLOCKS", False)


def test_tmpfs_has_no_device(tmp_path: Path) -> None:
    storage = find_storage(fake_root(tmp_path, "healthy"), "/dev/shm/x")
    assert (storage.device, storage.file_system, storage.block) == ("", "tmpfs", 4096)


def test_a_later_mount_hides_an_earlier_one_on_the_same_path(tmp_path: Path) -> None:
    table = [
        "1 0 259:2 / / rw - ext4 /dev/x rw",
        "2 1 0:9 / /a rw - xfs none rw",
        "3 2 0:8 / /a rw - nfs h:/ rw",
    ]
    system = fake_root(tmp_path, changes={"proc/self/mountinfo": "\n".join(table)})
    assert find_storage(system, "/a/b").file_system == "nfs"
    assert find_storage(system, "/ab").file_system == "ext4"


@pytest.mark.parametrize(
    ("errno_name", "direct"), [(None, True), ("EINVAL", False), ("EACCES", None), ("EROFS", None)]
)
def test_only_einval_means_that_o_direct_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno_name: str | None, direct: bool | None
) -> None:
    real_open = os.open

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        assert flags & os.O_DIRECT
        if errno_name is not None:
            raise OSError(getattr(errno, errno_name), errno_name)
        return real_open(path, flags & ~os.O_DIRECT, mode)

    monkeypatch.setattr("penstock.machine.discovery.storage.os.open", opened)
    assert find_storage(System(tmp_path), "/").direct is direct
    assert list(tmp_path.iterdir()) == []


def test_this_machine_is_discovered_and_can_be_saved_and_loaded(tmp_path: Path) -> None:
    machine = discover(storage=[tmp_path])
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert from_json(Machine, parse((tmp_path / "machine.json").read_text())) == machine
    with_cpus = [node for node in machine.nodes if node.cpus]
    assert sum(len(node.cpus) for node in with_cpus) >= len(os.sched_getaffinity(0))
    assert all(node.kind == "dram" for node in with_cpus)
    assert machine.storage[0].path == str(tmp_path)
    assert machine.made.by.startswith("penstock ")
