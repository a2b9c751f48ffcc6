"""Samplers on fake machines, on this machine, and with a fake driver."""

# ruff: noqa: N802 - the driver's function names

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.device import CpuDevice, Device
from penstock.engine.memory_usage import MemoryUsage
from penstock.machine.sysfs import System
from penstock.observe.hardware import ceilings, describe_hardware, physical_disks
from penstock.observe.records import GpuSample
from penstock.observe.samplers import (
    PAGE,
    CoreLoad,
    DiskTraffic,
    GpuDriver,
    MachineMemory,
    NodeMemory,
    ProcessMemory,
    Reading,
    Sampler,
    Samplers,
    TierMemorySampler,
    visible_gpus,
)
from penstock.tiers import Tier
from tests.support.machines import machine


def fake_system(root: Path, files: dict[str, str]) -> System:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return System(root)


def test_process_memory_includes_descendants(tmp_path: Path) -> None:
    system = fake_system(tmp_path, {
        "proc/5/statm": "100 10 0 0 0 0 0", "proc/5/task/5/children": "6 7 ",
        "proc/6/statm": "100 20 0 0 0 0 0", "proc/6/task/6/children": "",
        # process 7 has just ended
    })  # fmt: skip
    reading = Reading()

    ProcessMemory(5, system).read(reading)

    assert reading.host == {"rss": 30 * PAGE}


def test_machine_and_node_memory_are_read_from_meminfo(tmp_path: Path) -> None:
    system = fake_system(tmp_path, {
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    60 kB\n",
        "sys/devices/system/node/has_memory": "0,2\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 9 kB\nNode 0 MemUsed:  7 kB\n",
        "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal: 9 kB\nNode 2 MemUsed:  3 kB\n",
    })  # fmt: skip
    reading = Reading()

    MachineMemory(system).read(reading)
    NodeMemory(system).read(reading)

    assert reading.host == {"available": 60 * 1024, "nodes": {"0": 7 * 1024, "2": 3 * 1024}}


def test_disk_traffic_counts_physical_disks_only(tmp_path: Path) -> None:
    system = fake_system(tmp_path, {
        "proc/diskstats": "259 0 nvme0n1 1 2 10 4 5 6 20 8 0 0 0\n7 0 loop0 1 2 3 4 5 6 7 8 0 0\n",
        "sys/block/nvme0n1/device/model": "a disk", "sys/block/loop0/size": "4",
    })  # fmt: skip
    reading = Reading()

    DiskTraffic(physical_disks(system), system).read(reading)

    assert reading.disk == {"nvme0n1": (10 * 512, 20 * 512)}


def test_core_load_covers_the_time_since_the_previous_sample(tmp_path: Path) -> None:
    line = "cpu{} {} 0 0 {} {} 0 0 0 0 0\n"
    system = fake_system(tmp_path, {"proc/stat": "cpu 1 1\n" + line.format(0, 10, 10, 0)
                              + line.format(1, 0, 0, 0)})  # fmt: skip
    cores, reading = CoreLoad(system), Reading()
    cores.read(Reading())
    fake_system(
        tmp_path, {"proc/stat": "cpu 1 1\n" + line.format(0, 40, 15, 5) + line.format(1, 0, 0, 9)}
    )

    cores.read(reading)

    assert reading.cpu == (0.75, 0.0)


class FailingSampler:
    """A sampler that works a limited number of times."""

    name, every = "room temperature", 1

    def __init__(self) -> None:
        self.left = 1

    def read(self, into: Reading) -> None:
        if not self.left:
            raise OSError("sensor removed")
        self.left -= 1
        into.host["rss"] = 5


def test_a_sampler_that_fails_is_switched_off_with_one_note() -> None:
    notes: list[str] = []
    tiers = TierMemorySampler()
    tiers.memory_usages = lambda: [memory_usage(dram=3, pinned=7)]
    samplers = Samplers([FailingSampler(), tiers], notes.append)

    first, *later = [samplers.read().sample(0.0, 1, None) for _ in range(3)]

    assert first.host.rss == 5
    assert [sample.host.rss for sample in later] == [None, None]
    assert [(sample.tiers, sample.host.pinned) for sample in later] == [({"dram": 3}, 7)] * 2
    assert notes == ["room temperature is no longer sampled: sensor removed"]


class FakeGpu(CpuDevice):
    """A GPU that is known by name only; the driver reports 5 bytes outside torch, or nothing."""

    def __init__(self, where: str, reported: int | None) -> None:
        super().__init__()
        self.torch_device, self._reported = torch.device(where), reported

    def nbytes_outside_torch(self) -> int | None:
        return self._reported


def memory_usage(*, dram: int, pinned: int, device: Device | None = None) -> MemoryUsage:
    found = MemoryUsage(CpuDevice()) if device is None else MemoryUsage(device, 2)
    found.tiers, found.pinned = {Tier.DRAM: dram}, pinned
    return found


@pytest.mark.parametrize(("reported", "hbm"), [(5, 75), (None, 72)])
def test_tier_memory_is_read_from_engines_at_every_sample(reported: int | None, hbm: int) -> None:
    one = memory_usage(dram=3, pinned=0)
    other = memory_usage(dram=4, pinned=9, device=FakeGpu("cuda:1", reported))
    tiers = TierMemorySampler()
    tiers.memory_usages = lambda: [one, other]
    first = Reading(host={"pinned": 1})
    first.gpus[0]["reserved"], first.gpus[1]["reserved"] = 50, 70

    tiers.read(first)
    other.clear()
    tiers.read(later := Reading())

    assert first.tiers == {"dram": 7, "hbm": hbm}
    assert first.host["pinned"] == 10
    assert (later.tiers, later.host) == ({"dram": 3}, {})


def test_a_slow_sampler_is_read_less_often() -> None:
    slow = FailingSampler()
    slow.every, slow.left = 3, 99
    samplers = Samplers([slow], lambda text: None)

    read = [samplers.read().host for _ in range(7)]

    assert [bool(host) for host in read] == [True, False, False, True, False, False, True]


def test_this_machine_can_be_sampled() -> None:
    hardware = describe_hardware()
    samplers: list[Sampler] = [
        ProcessMemory(), MachineMemory(), DiskTraffic(hardware.disks), CoreLoad(),
    ]  # fmt: skip
    all_samplers = Samplers(samplers, pytest.fail)
    for _ in range(5):  # the first reading has no core load yet
        reading = all_samplers.read()

    assert reading.host["rss"] > 1 << 20
    assert reading.host["available"] > 0
    assert len(reading.cpu) >= 1
    assert hardware.cpus >= 1
    assert hardware.nodes


def test_ceilings_are_read_from_a_machine_file() -> None:
    found = ceilings(machine(link=25e9, dram=80e9))

    assert found["h2d"] == found["d2h"] == 25e9
    assert found["node0"] == 80e9  # a copy at 40 GB/s reads 40 and writes 40


# The NVIDIA driver.


class NvmlError(Exception):
    """The exception of the driver's library."""


class FakeNvml:
    """A driver with two GPUs. Only the first has PCIe counters."""

    NVMLError = NvmlError
    NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 0

    def __init__(self) -> None:
        self.asked = threading.Event()

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NvmlError
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        if name != "GPU-b":
            raise NvmlError
        return 1

    def nvmlDeviceGetMemoryInfo(self, card: int) -> Any:
        return SimpleNamespace(used=100 + card)

    def nvmlDeviceGetUtilizationRates(self, card: int) -> Any:
        if card == 1:
            raise NvmlError
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetPcieThroughput(self, card: int, kind: int) -> int:
        if card == 1:
            self.asked.set()
            raise NvmlError
        return 4 if kind == self.NVML_PCIE_UTIL_RX_BYTES else 2


def test_the_driver_reports_memory_utilisation_and_pcie_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml, reading = FakeNvml(), Reading()

    @contextlib.contextmanager
    def opened() -> Iterator[FakeNvml]:
        yield nvml

    gpus = GpuDriver(opened)
    assert nvml.asked.wait(10)
    gpus.read(reading)
    gpus.close()

    assert reading.sample(0.0, None, None).gpu == (
        GpuSample(used=100, utilisation=0.5, h2d=4000.0, d2h=2000.0),
        GpuSample(used=101),
    )


def test_without_a_driver_no_gpus_are_sampled() -> None:
    reading = Reading()

    @contextlib.contextmanager
    def opened() -> Iterator[None]:
        yield None

    gpus = GpuDriver(opened)
    gpus.read(reading)
    gpus.close()

    assert reading.gpus == {}


@pytest.mark.parametrize(
    ("named", "found"),
    [(None, [0, 1]), ("1,0", [1, 0]), ("1", [1]), ("GPU-b", [1]), ("0,7,1", [0]), ("", [])],
)
def test_visible_gpus_are_in_cudas_order(
    named: str | None, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)

    assert visible_gpus(FakeNvml()) == found
