"""Links between GPUs, and network cards: what the driver and the kernel report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.errors import MachineError
from penstock.machine.discovery.gpu_links import find_gpu_links, grouped_links
from penstock.machine.discovery.nics import find_nics
from penstock.machine.machine import Figure, Gpu, GpuLink, Machine, MemoryNode, Nic
from penstock.machine.presets import cpu_machine
from penstock.machine.sysfs import System
from penstock.records import from_json, to_json
from penstock.units import GiB
from tests.support.fake_sysfs import fake_root

NODE = MemoryNode(id=0, kind="dram", capacity=GiB)


def machine(*links: GpuLink, gpus: int = 4) -> Machine:
    return Machine(nodes=(NODE,), gpus=tuple(Gpu(index=i) for i in range(gpus)), gpu_links=links)


def link(gpus: tuple[int, ...], kind: str, rate: float | None = None) -> GpuLink:
    figure = None if rate is None else Figure.from_number(rate)
    return GpuLink(gpus=gpus, kind=kind, bytes_per_second=figure)  # type: ignore[arg-type]


class FakeNvml:
    """A driver with four GPUs: NVLink within pairs of neighbours, and `across` between pairs."""

    NVMLError = RuntimeError
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2

    def __init__(self, across: str) -> None:
        self.across = across

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:  # noqa: N802
        kind = "nvlink" if one // 2 == other // 2 else self.across
        supported = {"nvlink": (1, 2), "pcie": (1,), "none": ()}[kind]
        return 0 if capability in supported else 3


def test_the_driver_reports_the_kind_of_link_of_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    for across in ("pcie", "none"):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(across))  # type: ignore[arg-type]
        found = {each.gpus: each.kind for each in find_gpu_links(System())}
        assert found == {
            (0, 1): "nvlink", (2, 3): "nvlink",
            **dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], across),
        }  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("nvlink"))  # type: ignore[arg-type]
    assert find_gpu_links(System()) == (GpuLink(gpus=(0, 1, 2, 3), kind="nvlink"),)


def test_another_machines_files_have_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pcie"))  # type: ignore[arg-type]
    assert find_gpu_links(System(tmp_path)) == ()


def test_one_gpu_has_no_link() -> None:
    assert grouped_links([0], {}) == ()


def test_gpus_are_as_fast_as_the_slowest_link_between_them() -> None:
    pairs = machine(
        link((0, 1), "nvlink", 300e9), link((2, 3), "nvlink", 200e9), link((0, 2), "pcie", 20e9),
        link((0, 3), "pcie", 20e9), link((1, 2), "pcie", 12e9), link((1, 3), "none"),
    )  # fmt: skip

    def found(*gpus: int) -> tuple[str, float | None] | None:
        each = pairs.gpu_link(gpus)
        if each is None:
            return None
        return each.kind, each.bytes_per_second.median if each.bytes_per_second else None

    assert found(0, 1) == ("nvlink", 300e9)
    assert found(0, 1, 2) == ("pcie", 12e9)
    assert found(0, 1, 2, 3) == ("none", None)
    assert machine(link((0, 1), "nvlink")).gpu_link((0, 2)) is None
    assert machine(link((0, 1, 2, 3), "pcie"), link((0, 1), "nvlink")).gpu_link((0, 1)) == link(
        (0, 1), "nvlink"
    )
    assert machine(gpus=1).gpu_link((0,)) is None


def test_links_and_cards_survive_a_file_and_files_without_them_still_load() -> None:
    nic = Nic(name="eth0", bytes_per_second=Figure.from_number(12.5e9), node=0, direct=True)
    whole = Machine(
        nodes=(NODE,), gpus=(Gpu(index=0), Gpu(index=1)), gpu_links=(link((0, 1), "pcie", 2e10),),
        nics=(nic,), machines=4,
    )  # fmt: skip
    assert from_json(Machine, to_json(whole)) == whole
    old = from_json(Machine, {"nodes": [{"id": 0, "kind": "dram", "capacity": 1024}]})
    assert (old.gpu_links, old.nics, old.machines) == ((), (), 1)
    assert cpu_machine(whole).gpu_links == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_links": [{"gpus": [0, 7], "kind": "pcie"}]}, r"gpu_links\[0\]\.gpus: there is no"),
        ({"gpu_links": [{"gpus": [0], "kind": "pcie"}]}, r"gpu_links\[0\]\.gpus: must list at l"),
        ({"gpu_links": [{"gpus": [0, 0], "kind": "pcie"}]}, r"gpu_links\[0\]\.gpus: must list at"),
        ({"gpu_links": [{"gpus": [0, 1], "kind": "usb"}]}, r"gpu_links\[0\]\.kind: must be"),
        ({"nics": [{"name": "a", "node": 3}]}, r"nics\[0\]\.node: there is no node 3"),
        ({"nics": [{"name": "a"}, {"name": "a"}]}, r"nics: name a is listed twice"),
        ({"machines": 0}, r"machines: must be 1 or more"),
    ],
)
def test_wrong_links_are_rejected_by_field(change: Mapping[str, object], message: str) -> None:
    whole = {
        "nodes": [{"id": 0, "kind": "dram", "capacity": 1024}],
        "gpus": [{"index": 0}, {"index": 1}],
        **change,
    }
    with pytest.raises(MachineError, match=message):
        from_json(Machine, whole, error=MachineError)


def test_connected_cards_are_listed_once_with_the_speed_of_their_link(tmp_path: Path) -> None:
    card, other = "sys/devices/pci0000:00/0000:00:01.0", "sys/devices/pci0000:00/0000:00:02.0"
    system = fake_root(
        tmp_path,
        changes={
            f"{card}/numa_node": "0",
            f"{card}/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            f"{card}/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            f"{card}/infiniband/mlx5_0/ports/2/rate": "400 Gb/sec (4X NDR)",
            f"{card}/infiniband/mlx5_0/ports/2/state": "1: DOWN",
            f"{card}/net/ib0/speed": "200000",
            f"{other}/numa_node": "-1",
            f"{other}/net/eth0/speed": "25000",
            "sys/devices/virtual/net/lo/speed": "",
            "sys/devices/virtual/net/br0/speed": "10000",
            "sys/module/nvidia_peermem/refcnt": "0",
        },
    )
    for kind, name, where in (
        ("net", "ib0", card), ("infiniband", "mlx5_0", card), ("net", "eth0", other),
    ):  # fmt: skip
        device = tmp_path / where / kind / name / "device"
        device.symlink_to(tmp_path / where)
        listed = tmp_path / "sys/class" / kind
        listed.mkdir(parents=True, exist_ok=True)
        (listed / name).symlink_to(device.parent)
    for name in ("lo", "br0"):
        (tmp_path / "sys/class/net" / name).symlink_to(tmp_path / "sys/devices/virtual/net" / name)

    found = {nic.name: nic for nic in find_nics(system, [NODE])}

    assert set(found) == {"mlx5_0", "eth0"}
    assert found["mlx5_0"].bytes_per_second == Figure.from_number(50e9)
    assert (found["mlx5_0"].node, found["mlx5_0"].direct) == (0, True)
    assert found["eth0"].bytes_per_second == Figure.from_number(3.125e9)
    assert (found["eth0"].node, found["eth0"].direct) == (None, False)
