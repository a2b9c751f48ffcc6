"""Machine values and files: round trips, checks and look-ups."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MachineError, UnknownNodeError
from penstock.machine.machine import (
    Cpu,
    Figure,
    FirmwareFigures,
    Gpu,
    GpuLink,
    Machine,
    MemoryLimit,
    MemoryNode,
    MemoryRate,
    Nic,
    NodeCopy,
    Provenance,
    StoragePath,
    StorageRate,
    Transfer,
)
from penstock.records import from_json, layout, parse, to_json
from penstock.tiers import Tier
from penstock.units import GiB, MiB

DOCUMENT = Path(__file__).parents[2] / "docs/machine-file.md"


def figure(median: float = 2e9) -> Figure:
    return Figure(median=median, low=median / 2, high=median * 2, samples=5)


def full_machine() -> Machine:
    """Return a machine in which every field of every part has a value."""
    rates = tuple(
        MemoryRate(operation="read", threads=threads, bytes_per_second=figure(rate))
        for threads, rate in ((1, 10e9), (8, 60e9), (16, 55e9))
    )
    return Machine(
        name="full",
        made=Provenance(by="a test", date="2026-01-01", kernel="6.12", command="pytest"),
        cpu=Cpu(model="Some Processor", cores=2, isas=("avx2",)),
        nodes=(
            MemoryNode(
                id=0, kind="dram", capacity=64 * GiB, free=GiB, cpus=(0, 1),
                distances={0: 10, 3: 20}, latency=figure(1e-7), rates=rates,
            ),
            MemoryNode(
                id=3, kind="cxl", capacity=256 * GiB, devices=("mem0",), distances={0: 20, 3: 10},
                firmware=FirmwareFigures(
                    read_bandwidth=16e9, write_bandwidth=8e9, read_latency=3e-7, write_latency=2e-7
                ),
            ),
        ),
        node_copies=(NodeCopy(source=0, target=3, threads=2, bytes_per_second=figure()),),
        gpus=(
            Gpu(
                index=0, name="G", memory=80 * GiB, free=79 * GiB, pcie_generation=5,
                pcie_width=16, node=0, uuid="GPU-1", capability="9.0",
                matmul_flops=figure(), block_flops=figure(), memory_bandwidth=figure(),
                compiled_flops=figure(), attention_flops=figure(),
            ),
            Gpu(index=1),
        ),
        gpu_links=(GpuLink(gpus=(0, 1), kind="nvlink", bytes_per_second=figure()),),
        nics=(Nic(name="eth0", bytes_per_second=figure(), latency=figure(1e-5), node=0,
                  direct=True),),
        machines=2,
        transfers=(
            Transfer(direction="both", gpus=(0,), node=3, nbytes=MiB, streams=2,
                     bytes_per_second=figure()),
        ),
        storage=(
            StoragePath(
                path="/scratch", device="/dev/nvme0n1", model="M", file_system="ext4", block=512,
                capacity=GiB, free=MiB, rotational=False, direct=True,
                rated_writes=600 * GiB,
                rates=(StorageRate(operation="read", block=MiB, depth=8,
                                   bytes_per_second=figure()),),
            ),
        ),
        process_memory=2 * GiB,
        memory_limit=MemoryLimit(name="/sys/fs/cgroup/memory.max", nbytes=GiB, left=1),
    )  # fmt: skip


def as_json(machine: Machine) -> dict[str, Any]:
    document = to_json(machine)
    assert isinstance(document, dict)
    return document


def test_the_full_example_leaves_no_field_at_its_default() -> None:
    """Ensure that the round trip below covers every field."""

    machine = full_machine()
    for part in (machine, machine.cpu, machine.made, machine.gpus[0], machine.storage[0]):
        for field in dataclasses.fields(part):
            if field.name != "version":
                assert getattr(part, field.name) not in (None, "", ()), field.name


def test_saving_and_loading_returns_an_equal_machine(tmp_path: Path) -> None:
    machine = full_machine()
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


def test_a_machine_can_be_copied_pickled_and_hashed() -> None:
    machine = full_machine()
    assert copy.deepcopy(machine) == machine
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert hash(pickle.loads(pickle.dumps(machine))) == hash(machine)


def test_distances_cannot_be_changed() -> None:
    distances = {0: 10}
    node = MemoryNode(id=0, kind="dram", capacity=1, distances=distances)
    distances[0] = 99
    assert node.distances == {0: 10}
    with pytest.raises(TypeError):
        node.distances[0] = 99  # type: ignore[index]


def test_a_minimal_file_needs_only_nodes_with_id_kind_and_capacity() -> None:
    written = {"nodes": [{"id": 0, "kind": "dram", "capacity": "64GiB"}]}
    machine = from_json(Machine, written)
    assert machine.node(0) == MemoryNode(id=0, kind="dram", capacity=64 * GiB)
    assert machine.node(0).tier is Tier.DRAM
    assert as_json(machine)["nodes"] == [{"id": 0, "kind": "dram", "capacity": 64 * GiB}]


def test_the_examples_in_the_document_load() -> None:
    examples = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.S)
    small, full = (from_json(Machine, parse(example), error=MachineError) for example in examples)
    assert [node.kind for node in small.nodes] == ["dram", "cxl"]
    assert full.transfers
    assert full.storage[0].rates
    assert full.gpus[0].memory == 24 * GiB


def test_the_document_names_every_field() -> None:
    text = DOCUMENT.read_text()
    parts = (
        Machine,
        MemoryNode,
        MemoryRate,
        FirmwareFigures,
        NodeCopy,
        Gpu,
        Transfer,
        StoragePath,
        GpuLink,
        Nic,
    )
    for part in (*parts, StorageRate, Figure, Cpu, Provenance):
        for field in dataclasses.fields(part):
            assert f"`{field.name}`" in text, f"{part.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nodes.1.kind", "hbm", 'm.json: nodes[1].kind: must be "dram" or "cxl", got "hbm"'),
        (
            "nodes.0.kind",
            "cxl",
            'm.json: nodes: must include at least one of kind "dram", got none',
        ),
        ("nodes.1.id", 0, "m.json: nodes: id 0 is listed twice"),
        ("nodes.1.cpus", [1], "m.json: nodes: CPU 1 is listed twice"),
        ("nodes.1.capacity", 0, "m.json: nodes[1].capacity: must be above 0, got 0"),
        ("nodes.0.free", "65GiB", "m.json: nodes[0].free: must be at most capacity, which is"),
        ("nodes.0.free", -1, "m.json: nodes[0].free: must be 0 or more, got -1"),
        (
            "nodes.0.distances",
            {"2": 20},
            "nodes[0].distances: there is no node 2; the file lists 0,",
        ),
        ("nodes.0.distances", {"0": 9}, "m.json: nodes[0].distances[0]: must be 10 or more"),
        ("nodes.0.latency", -1, "m.json: nodes[0].latency.median: must be above 0, got -1.0"),
        ("nodes.0.rates.0.threads", 0, "m.json: nodes[0].rates[0].threads: must be 1 or more"),
        ("nodes.1.firmware.read_latency", 0, "nodes[1].firmware.read_latency: must be above 0"),
        ("node_copies.0.target", 9, "m.json: node_copies[0].target: there is no node 9"),
        ("gpus.0.node", 9, "m.json: gpus[0].node: there is no node 9; the file lists 0, 3"),
        ("gpus.0.free", "81GiB", "m.json: gpus[0].free: must be at most memory"),
        ("transfers.0.gpus", [2], "m.json: transfers[0].gpus: there is no GPU 2; the file lists"),
        ("transfers.0.gpus", [], "m.json: transfers[0].gpus: must list at least one GPU"),
        ("transfers.0.node", 1, "m.json: transfers[0].node: there is no node 1"),
        ("transfers.0.bytes_per_second.low", 3e9, "bytes_per_second.median: must be between low"),
        ("transfers.0.bytes_per_second.high", 1e9, "bytes_per_second.median: must be between low"),
        ("storage.0.block", 513, "m.json: storage[0].block: must be a power of two, got 513"),
        ("storage.0.path", "", "m.json: storage[0].path: must be the path of a directory"),
        ("storage.0.rates.0.depth", 0, "m.json: storage[0].rates[0].depth: must be 1 or more"),
        ("cpu.cores", 0, "m.json: cpu.cores: must be 1 or more, got 0"),
        ("version", 2, "m.json: version: is 2, but this Penstock reads versions up to 1"),
        ("version", 0, "m.json: version: must be 1, got 0"),
    ],
)
def test_an_invalid_field_is_named(path: str, value: object, message: str) -> None:
    document = as_json(full_machine())
    at: Any = document
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in steps:
        at = at[step]
    at[last] = value
    with pytest.raises(MachineError, match=re.escape(message)):
        from_json(Machine, document, where="m.json", error=MachineError)


@pytest.mark.parametrize(
    ("part", "message"), [("gpus", "index 0 is listed"), ("storage", "path /scratch is listed")]
)
def test_a_device_listed_twice_is_named(part: str, message: str) -> None:
    document = as_json(full_machine())
    document[part] = document[part] * 2
    with pytest.raises(MachineError, match=f"^{part}: {message} twice$"):
        from_json(Machine, document, error=MachineError)


def test_values_created_in_python_are_checked() -> None:
    with pytest.raises(MachineError, match=r'^kind: must be "dram" or "cxl", got "hbm"$'):
        MemoryNode(id=0, kind="hbm", capacity=1)  # type: ignore[arg-type]
    with pytest.raises(MachineError, match=r"^median: must be above 0, got nan$"):
        Figure.from_number(float("nan"))


def test_a_file_that_is_not_json_raises_a_machine_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"nodes": []')
    with pytest.raises(MachineError, match=re.escape(f"{path}: line 1, column 13: is not JSON")):
        Machine.load(path)


def test_a_missing_file_raises_a_machine_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"none\.json: cannot be read: No such file"):
        Machine.load(tmp_path / "none.json")


def test_rate_returns_the_best_of_all_thread_counts_or_of_one() -> None:
    machine = full_machine()
    best, one = machine.rate(0, "read"), machine.rate(0, "read", threads=1)
    assert best is not None
    assert one is not None
    assert (best.median, one.median) == (60e9, 10e9)
    assert machine.rate(0, "read", threads=2) is None
    assert machine.rate(0, "write") is None
    assert machine.rate(3, "read") is None


def test_nodes_are_found_by_id_and_by_kind() -> None:
    machine = full_machine()
    assert [node.id for node in machine.dram_nodes] == [0]
    assert [node.id for node in machine.cxl_nodes] == [3]
    with pytest.raises(UnknownNodeError, match="there is no node 1; this machine has nodes 0, 3"):
        machine.node(1)


@settings(deadline=None)  # the machine may be busy, and this test is not about time
@given(st.binary(max_size=4), st.data())
def test_a_damaged_file_loads_or_raises_a_record_error(noise: bytes, data: st.DataObject) -> None:
    raw = layout(to_json(full_machine())).encode()
    start = data.draw(st.integers(0, len(raw)))
    length = data.draw(st.integers(0, 8))
    try:
        from_json(Machine, parse(raw[:start] + noise + raw[start + length :]))
    except ValueError as error:
        raised = type(error).__name__
    else:
        raised = "RecordError"
    assert raised == "RecordError"


def test_discovery_imports_neither_torch_nor_the_native_core() -> None:
    script = (
        "import sys, penstock.machine.machine, penstock.machine.discovery as d; d.discover();"
        "print([m for m in ('torch', 'penstock._native') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_saved_files_are_plain_json(tmp_path: Path) -> None:
    full_machine().save(tmp_path / "machine.json")
    assert json.loads((tmp_path / "machine.json").read_text())["nodes"][1]["id"] == 3
