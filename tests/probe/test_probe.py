"""A complete probe: what it measures, how it is printed, and that it leaves nothing behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from penstock import _native
from penstock.cli import main
from penstock.errors import ProbeError, UnknownNodeError
from penstock.machine.discovery import discover
from penstock.machine.machine import Figure, Gpu, Machine, MemoryRate
from penstock.machine.sysfs import NodeBytes, System
from penstock.probe import ProbeOptions, ProbeResult, copies, plot, probe, session, tables
from penstock.probe.measurement import Progress
from penstock.units import GiB, MiB
from tests.probe.conftest import PROCESS
from tests.support.fake_sysfs import fake_root
from tests.support.probing import NODE, TINY, FakeCopier, make_tiny, no_thread_is_left


@pytest.fixture
def tiny(monkeypatch):
    make_tiny(monkeypatch)


def test_a_probe_measures_everything_and_can_be_saved_and_loaded(tmp_path, tiny):
    reports = []
    options = ProbeOptions(quick=True, storage=(tmp_path,), gpus=False)
    result = probe(options, lambda done, total, text: reports.append((done, total, text)))
    (node, *_) = result.machine.nodes
    assert {r.operation for r in node.rates} == {"read", "write", "copy", "sweep"}
    assert {r.moments for r in node.rates} == {None, "fp32", "bf16", "int8"}
    assert node.latency is not None
    assert len(result.machine.storage[0].rates) == 6
    assert result.machine.process_memory == PROCESS
    result.machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == result.machine
    assert reports[-1][0] == reports[-1][1]
    assert [done for done, _, _ in reports] == sorted(done for done, _, _ in reports)


def test_a_probe_is_printed_as_tables_and_plotted(tmp_path, tiny):
    result = probe(ProbeOptions(quick=True, storage=(tmp_path,), gpus=False))
    with_gpu = _with_transfers(result)
    text = _in_80_columns(with_gpu)
    for word in (
        "Memory",
        "latency",
        "GB/s",
        "Optimizer sweep",
        "int8",
        "h2d",
        "both",
        "Storage",
        "(Python, PyTorch, CUDA, compiler): 2.00 GiB",
        "note: a note",
        "±",
    ):
        assert word in text
    assert "…" not in text  # rich marks a truncated cell this way
    plot.save_plot(with_gpu.machine, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


def _in_80_columns(result) -> str:
    output = io.StringIO()
    Console(width=80, file=output).print(tables.tables(result), soft_wrap=False)
    return output.getvalue()


def _with_transfers(result):
    (wanted,) = copies.plan([0], GiB, quick=True)
    transfers = tuple(copies.probe_group(0, wanted, FakeCopier(max_nbytes=GiB), TINY, Progress(0)))
    machine = replace(result.machine, gpus=(Gpu(index=0),), transfers=transfers)
    return replace(result, machine=machine, notes=("a note",))


def test_an_empty_plot_is_rejected():
    with pytest.raises(ProbeError, match="nothing was measured"):
        plot.save_plot(Machine(nodes=(NODE,)), Path("never.png"))


def test_importing_the_probe_does_not_import_torch():
    code = "import sys, penstock.probe, penstock.probe.tables; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_full_node_is_skipped_with_a_note(tiny):
    class Full(System):
        def node_bytes(self, node):
            return NodeBytes(total=GiB, free=MiB, available=MiB)

    result = probe(ProbeOptions(quick=True, gpus=False), system=Full())
    assert result.machine.nodes[0].rates == ()
    assert any("node 0: not measured: it needs 8.00 MiB" in note for note in result.notes)


@pytest.mark.parametrize(("json", "stream"), [([], "out"), (["--json"], "err")])
def test_notes_are_printed(json, stream, monkeypatch, tmp_path, capsys):
    result = ProbeResult(machine=Machine(nodes=(NODE,)), notes=("no sweep",), seconds=1.0)
    monkeypatch.setattr("penstock.probe.probe", lambda *_: result)
    assert main.run(["probe", "-o", str(tmp_path / "machine.json"), *json]) == 0
    assert "note: no sweep" in getattr(capsys.readouterr(), stream)


def test_an_unknown_node_is_named():
    with pytest.raises(UnknownNodeError, match="there is no node 99"):
        probe(ProbeOptions(nodes=(99,)))


def test_gpu_memory_is_not_measured_as_a_node(tmp_path):
    changes = {
        "proc/driver/nvidia/gpus/0000:01:00.0/numa_status": "Node: 2",
        "proc/self/status": "Mems_allowed_list:\t0-2",
    }
    system = fake_root(tmp_path, "healthy", "numa", changes=changes)
    assert system.allowed_nodes() == (0, 1, 2)
    probe_session = session.Session(discover(system), ProbeOptions(gpus=False), system)
    assert [node.id for node in probe_session._nodes] == [0, 1]


def test_an_unknown_instruction_set_is_rejected_before_measuring(monkeypatch):
    def refuse():
        raise ValueError("PENSTOCK_ISA=sse9 names no instruction set")

    monkeypatch.setattr(_native, "isa_name", refuse)
    with pytest.raises(ProbeError, match="PENSTOCK_ISA=sse9"):
        probe(ProbeOptions(gpus=False))


@pytest.mark.parametrize("name", ["p.xyz", "pict"])
def test_a_plot_with_an_unknown_format_is_rejected(name, tmp_path):
    with pytest.raises(ProbeError, match=r"cannot be plotted: its name must end in one of .*\.png"):
        plot.check_plot(tmp_path / name)
    plot.check_plot(tmp_path / "P.PNG")


@pytest.mark.parametrize(
    ("name", "reason"), [("gone/p.png", "No such file or directory"), ("p.png", "Is a directory")]
)
def test_a_plot_that_cannot_be_written_raises_a_probe_error(name, reason, tmp_path):
    (tmp_path / "p.png").mkdir()
    rate = MemoryRate(operation="read", threads=1, bytes_per_second=Figure.from_number(1e9))
    machine = Machine(nodes=(replace(NODE, rates=(rate,)),))
    with pytest.raises(ProbeError, match=f"{name} cannot be written: {reason}"):
        plot.save_plot(machine, tmp_path / name)


def test_ctrl_c_leaves_no_thread_and_no_file(tmp_path, tiny):
    def interrupt(done, total, text):
        if "read" in text and str(tmp_path) in text:
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/proc/self/fd"))
    with no_thread_is_left(), pytest.raises(KeyboardInterrupt):
        probe(ProbeOptions(quick=True, storage=(tmp_path,), gpus=False), interrupt)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Background jobs of a script ignore SIGINT, and child processes inherit that.
PROBE_UNTIL_STOPPED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from penstock.probe import ProbeOptions, probe

def report(done, total, text):
    print(text, flush=True)

try:
    while True:
        probe(ProbeOptions(quick=True, storage=(Path(sys.argv[1]),), nodes=(), gpus=False), report)
except KeyboardInterrupt:
    import threading
    print("left:", [t.name for t in threading.enumerate() if t is not threading.main_thread()])
    sys.exit(130)
"""


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_process_leaves_nothing_behind(stop_signal, tmp_path):
    command = [sys.executable, "-c", PROBE_UNTIL_STOPPED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "read, 64.0 KiB x 8" in line:  # in the middle of a measurement, with threads running
                process.send_signal(stop_signal)
                break
        rest, _ = process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
    if stop_signal == signal.SIGINT:
        assert process.returncode == 130
        assert "left: []" in rest
