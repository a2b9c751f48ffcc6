"""The memory of a process is what the OS counts for a child that loads what a run loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import ProbeError
from penstock.memory.process import peak_resident_nbytes, resident_nbytes, tree_nbytes
from penstock.probe import process
from penstock.probe.process import measure_process
from penstock.units import GiB, MiB


def test_a_process_with_torch_needs_hundreds_of_mebibytes() -> None:
    nbytes = measure_process(gpu=False)

    assert 200 * MiB < nbytes < 4 * GiB


def test_memory_that_the_child_allocates_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CPU", "import sys")
    small = measure_process(gpu=False)
    monkeypatch.setattr(process, "_CPU", "import sys; kept = b'x' * (64 << 20)")
    large = measure_process(gpu=False)

    assert 60 * MiB < large - small < 80 * MiB


def test_processes_that_the_child_starts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = "kept = b'x' * (64 << 20); print(); input()"
    start = "subprocess.Popen([sys.executable, '-c', code], stdin=-1, stdout=-1)"
    program = f"import subprocess, sys; code = {worker!r}; child = {start}; child.stdout.read(1)"
    monkeypatch.setattr(process, "_CPU", program)

    assert measure_process(gpu=False) > 64 * MiB


def test_a_child_that_fails_is_an_error_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CPU", "raise SystemExit('no torch here')")

    with pytest.raises(ProbeError, match="exit code 1: no torch here"):
        measure_process(gpu=False)


def test_the_tree_of_a_process_that_has_ended_is_empty() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert tree_nbytes(child.pid) == 0


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident_nbytes()
    kept = bytearray(b"x") * (64 << 20)
    grown = resident_nbytes() - before

    assert 60 * MiB < grown < 80 * MiB
    assert peak_resident_nbytes() >= before + 60 * MiB
    assert len(kept) == 64 << 20
