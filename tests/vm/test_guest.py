"""Placement, discovery and the probe against a real kernel with several nodes and a CXL device.

Only the tests of the probe and the doctor import torch, because that takes most of a minute in the
guest. tests/conformance covers tensors.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import doctor
from penstock.cli import main
from penstock.errors import (
    NodeFullError,
    OfflineNodeError,
    UnknownNodeError,
)
from penstock.machine.discovery import discover
from penstock.machine.machine import Machine
from penstock.machine.sysfs import System
from penstock.memory.arena import Arena
from penstock.memory.placement import Interleave, Node, Stripe
from penstock.memory.residency import Residency, residency
from penstock.probe.sweep import MOMENTS
from penstock.units import GiB, MiB
from tests.vm.guest import FAR, MODE, NODES, PAGE, UNIT, allocate, where

pytestmark = pytest.mark.vm


def test_the_guest_has_the_nodes_of_its_mode() -> None:
    assert System().memory_nodes() == NODES


@pytest.mark.parametrize("huge", [None, "thp"])
@pytest.mark.parametrize("node", NODES)
def test_every_page_is_on_the_requested_node(node: int, huge: str | None) -> None:
    region = allocate(2 * UNIT + PAGE, Node(node), huge=huge)

    assert where(region) == Residency(pages={node: 2 * UNIT // PAGE + 1}, unmapped=0)


@pytest.mark.parametrize("weights", [{1: 2, FAR: 1}, {0: 1, 1: 1, FAR: 1}, {FAR: 3, 0: 2}], ids=str)
def test_a_stripe_distributes_units_by_weight(weights: dict[int, int]) -> None:
    stripe = Stripe(weights)
    region = allocate(7 * UNIT, stripe)

    for unit in range(7):
        pages_of_unit = residency(region.address + unit * UNIT, UNIT)
        assert pages_of_unit.pages == {stripe.pattern[unit % len(stripe.pattern)]: UNIT // PAGE}
    assert where(region).nbytes == {n: s for n, s in sorted(stripe.shares(7 * UNIT).items()) if s}


def test_interleave_distributes_pages_evenly() -> None:
    region = allocate(UNIT, Interleave([0, 1, FAR]))

    counts = where(region).pages

    assert set(counts) == {0, 1, FAR}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_long_stripe_needs_one_mapping_and_not_one_per_unit() -> None:
    region = allocate(40 * UNIT, Stripe([0, 1]))
    end = region.address + region.mapped_nbytes
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    inside = [low for low, high in spans if region.address <= int(low, 16) < end]

    assert len(inside) <= 2, f"{len(inside)} mappings: the kernel did not merge them"


@pytest.mark.parametrize("node", NODES[1:])
def test_a_full_node_raises_an_error_with_numbers_and_advice(node: int) -> None:
    wanted = System().node_bytes(node).total + 64 * MiB

    with pytest.raises(NodeFullError, match=f"on node {node}, which has") as caught:
        allocate(wanted, Node(node))

    assert caught.value.wanted == wanted
    assert 0 < caught.value.free < wanted
    assert list(caught.value.roomier) == [0]
    assert "node 0 has" in str(caught.value)


def test_a_stripe_that_overfills_one_node_names_that_node() -> None:
    with pytest.raises(NodeFullError) as caught:
        allocate(3 * GiB, Stripe({0: 1, FAR: 2}))

    assert caught.value.node == FAR
    assert caught.value.wanted == 2 * GiB


def test_a_missing_node_is_unknown() -> None:
    with pytest.raises(UnknownNodeError, match=r"no node 63; this machine has nodes 0, 1"):
        allocate(1, Node(63))


@pytest.mark.skipif(MODE != "cxlperf", reason="only this guest has a node without memory")
def test_a_node_without_memory_is_offline() -> None:
    with pytest.raises(OfflineNodeError, match="node 2 has no memory online") as caught:
        allocate(1, Node(2))

    assert caught.value.online == NODES


def test_the_error_of_a_confined_process_lists_the_allowed_nodes() -> None:
    code = """if True:
        from penstock.errors import ForbiddenNodeError
        from penstock.memory.arena import Arena
        from penstock.memory.placement import Node
        Arena(4096, Node(0))
        try:
            Arena(4096, Node(1))
        except ForbiddenNodeError as error:
            assert error.allowed == (0,), error.allowed
            raise SystemExit(42)
    """
    group = Path("/sys/fs/cgroup/confined")
    (group.parent / "cgroup.subtree_control").write_text("+cpuset")
    group.mkdir()
    (group / "cpuset.mems").write_text("0")
    join = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"

    run = subprocess.run(["sh", "-c", join], capture_output=True, text=True, check=False)

    group.rmdir()
    assert run.returncode == 42, run.stderr


def test_an_arena_is_where_it_was_placed() -> None:
    arena = Arena("6MiB", Stripe({1: 2, FAR: 1}))
    blocks = [arena.take(3 * MiB), arena.take(3 * MiB)]

    assert arena.where().nbytes == {1: 2 * UNIT, FAR: UNIT}
    assert residency(blocks[0].address, 3 * MiB).nbytes == {1: 3 * MiB}


def test_nodes_without_cpus_are_cxl_nodes() -> None:
    machine = discover()

    kinds = {node.id: node.kind for node in machine.nodes}

    assert kinds == {0: "dram", 1: "cxl", FAR: "cxl"}
    assert [node.id for node in machine.nodes if node.cpus] == [0]


@pytest.mark.skipif(MODE == "numa", reason="this guest has no CXL device")
def test_the_cxl_device_is_found_on_its_node() -> None:
    machine = discover()

    assert machine.node(FAR).devices == ("mem0",)
    assert not machine.node(1).devices


@pytest.mark.skipif(MODE == "cxl", reason="the firmware of this guest reports no performance")
def test_firmware_figures_are_converted_to_bytes_and_seconds() -> None:
    near, far = discover().node(0).firmware, discover().node(FAR).firmware

    assert near is not None
    assert far is not None
    assert near.read_bandwidth is not None
    assert far.read_bandwidth is not None
    assert 1e9 < far.read_bandwidth < near.read_bandwidth
    assert far.read_latency is not None
    assert 1e-8 < far.read_latency < 1e-4


@pytest.mark.skipif(MODE == "cxl", reason="needs torch; the cxlperf guest covers it")
def test_a_quick_probe_measures_every_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "machine.json"

    assert main.run(["probe", "--quick", "-o", str(out), "--json"]) == 0

    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text())
    machine = Machine.load(out)
    assert [node.id for node in machine.nodes] == list(NODES)
    for node in machine.nodes:
        assert node.latency is not None
        rates = {rate.operation for rate in node.rates if rate.operation != "sweep"}
        assert rates == {"read", "write", "copy"}
        sweeps = {rate.moments for rate in node.rates if rate.operation == "sweep"}
        # Emulated memory may be too slow for a sweep. Then a note says that it was skipped.
        assert sweeps | skipped_sweeps(node.id, printed.err) == set(MOMENTS)
        assert not sweeps & skipped_sweeps(node.id, printed.err)
    pairs = {(copy.source, copy.target) for copy in machine.node_copies}
    assert pairs == set(itertools.permutations(NODES, 2))


def skipped_sweeps(node: int, notes: str) -> set[str]:
    """Return the moment formats that a note of the probe reports as skipped on a node."""
    words = rf"^note: node {node}: sweep, (\w+) moments: not measured: .* would take about"
    return set(re.findall(words, notes, flags=re.M))


def test_the_doctor_finds_nothing_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    if MODE == "cxl":  # in this guest only these checks would import torch
        for check in ("torch", "cuda versions"):
            monkeypatch.delitem(doctor.CHECKS, check)

    findings = {finding.check: finding for finding in doctor.examine()}

    assert "bad" not in {finding.status for finding in findings.values()}
    assert findings["cxl"].status == "ok"
