"""System reads the kernel's files, including those of simulated machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.machine.sysfs import parse_ids
from penstock.units import KiB
from tests.support.fake_sysfs import fake_root


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", ()), ("0", (0,)), ("0-2,5\n", (0, 1, 2, 5)), ("junk", ()), ("3,junk", (3,))],
)
def test_parse_ids_reads_kernel_lists(text: str, ids: tuple[int, ...]) -> None:
    assert parse_ids(text) == ids


@given(st.text())
def test_parse_ids_accepts_any_text(text: str) -> None:
    if len(text) < 8:  # more digits could be a valid and very long range
        assert all(isinstance(id, int) for id in parse_ids(text))


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    text = "MemTotal: 100 kB\nMemFree: 40 kB\nMemAvailable: 60 kB"
    system = fake_root(tmp_path, changes={"proc/meminfo": text})

    assert system.memory_nodes() == (0,)
    assert system.allowed_nodes() == (0,)
    assert system.node_bytes(0).available == 60 * KiB
    assert system.nearest_cpus(0) == tuple(sorted(os.sched_getaffinity(0)))


TWO_NODES = {
    "sys/devices/system/node/possible": "0-1",
    "sys/devices/system/node/online": "0-1",
    "sys/devices/system/node/has_memory": "0-1",
    "sys/devices/system/node/node0/cpulist": "0-7",
    "sys/devices/system/node/node1/cpulist": "",
    "sys/devices/system/node/node0/distance": "10 20",
    "sys/devices/system/node/node1/distance": "20 10",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 1000 kB\nNode 1 MemFree: 400 kB\n"
    "Node 1 Active(file): 60 kB\nNode 1 Inactive(file): 40 kB\n",
    "proc/meminfo": "MemTotal: 9000 kB\nMemFree: 8000 kB\nMemAvailable: 8500 kB",
}


def test_with_several_nodes_each_node_has_its_own_figures(tmp_path: Path) -> None:
    found = fake_root(tmp_path, changes=TWO_NODES).node_bytes(1)

    assert (found.total, found.free) == (1000 * KiB, 400 * KiB)
    assert found.available == 450 * KiB  # without watermarks, half of the page cache counts


ZONE = """Node {node}, zone   {name}
  per-node stats
      nr_inactive_file 280638
  pages free     100
        min      {min}
        low      {low}
        high     {high}
        managed  {managed}
        protection: (0, {protected}, {protected})
  pagesets
    cpu: 0
              count:    0
              high:     999
              low:      999
"""


def test_available_memory_includes_the_cache_above_the_low_watermark(tmp_path: Path) -> None:
    """Compute MemAvailable for one node as the kernel computes it for the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    zones = [
        ZONE.format(node=0, name="Normal", min=1, low=7000, high=9000, managed=10**6, protected=0),
        ZONE.format(node=1, name="DMA32", min=2, low=10, high=12, managed=5000, protected=300),
        ZONE.format(node=1, name="Normal", min=20, low=90, high=188, managed=10**6, protected=0),
        ZONE.format(node=1, name="Movable", min=0, low=0, high=0, managed=0, protected=700),
    ]
    meminfo = "".join(
        f"Node 1 {key}: {pages * page // KiB} kB\n"
        for key, pages in {
            "MemTotal": 10**6, "MemFree": 40_000, "Active(file)": 500_000,
            "Inactive(file)": 300_000, "KReclaimable": 120, "SReclaimable": 50,
        }.items()
    )  # fmt: skip
    changes = {
        **TWO_NODES,
        "proc/zoneinfo": "".join(zones).rstrip(),
        "sys/devices/system/node/node1/meminfo": meminfo.rstrip(),
    }
    found = fake_root(tmp_path, changes=changes).node_bytes(1)

    unusable, low = (12 + 300) + 188, 100  # a zone without pages reserves nothing
    assert found.available == page * (40_000 - unusable + 800_000 - low + 120 // 2)


def test_a_node_with_less_than_its_reserve_has_nothing_available(tmp_path: Path) -> None:
    zone = ZONE.format(node=1, name="Normal", min=1, low=700, high=900, managed=10**6, protected=0)
    changes = {**TWO_NODES, "proc/zoneinfo": zone.rstrip()}

    assert fake_root(tmp_path, changes=changes).node_bytes(1).available == 0


def test_nearest_cpus_of_a_node_without_cpus_are_on_another_node(tmp_path: Path) -> None:
    system = fake_root(tmp_path, changes=TWO_NODES)
    usable = os.sched_getaffinity(0)

    assert set(system.nearest_cpus(1)) == {c for c in range(8) if c in usable}


def test_allowed_nodes_are_those_the_process_is_confined_to(tmp_path: Path) -> None:
    status = {"proc/self/status": "Name:\tx\nMems_allowed_list:\t1\n"}
    system = fake_root(tmp_path, changes={**TWO_NODES, **status})

    assert system.allowed_nodes() == (1,)
