"""A saved probe applies to the machine it was measured on, and to no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.machine.machine import Machine
from penstock.machine.presets import preset
from penstock.machine.probe_cache import cache_path, merge_probe, save_probe
from penstock.units import GiB

PROBED = replace(preset("h200"), process_memory=3 * GiB)


def unmeasured(probed: Machine = PROBED) -> Machine:
    """Return the same machine without measurements and with less free memory."""
    return replace(
        probed,
        nodes=tuple(replace(node, rates=(), free=GiB) for node in probed.nodes),
        gpus=tuple(
            replace(gpu, matmul_flops=None, block_flops=None, free=2 * GiB) for gpu in probed.gpus
        ),
        transfers=(),
        storage=tuple(replace(storage, rates=()) for storage in probed.storage),
        process_memory=None,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    PROBED.save(path)
    return path


def test_speeds_come_from_the_probe_and_free_memory_from_now(saved: Path) -> None:
    found, remark = merge_probe(unmeasured(), saved)

    assert found.nodes[0].rates == PROBED.nodes[0].rates
    assert found.nodes[0].free == GiB
    assert found.gpus[0].block_flops == PROBED.gpus[0].block_flops
    assert found.gpus[0].free == 2 * GiB
    assert found.transfers == PROBED.transfers
    assert found.storage[0].rates == PROBED.storage[0].rates
    assert found.process_memory == PROBED.process_memory == 3 * GiB
    assert str(saved) in remark


@pytest.mark.parametrize("change", ["cpu", "memory", "gpu", "nodes"])
def test_a_probe_of_another_machine_is_ignored(saved: Path, change: str) -> None:
    here = unmeasured()
    node, gpu = here.nodes[0], here.gpus[0]
    other = {
        "cpu": replace(here, cpu=replace(here.cpu, model="another")),
        "memory": replace(here, nodes=(replace(node, capacity=2 * node.capacity),)),
        "gpu": replace(here, gpus=(replace(gpu, uuid="GPU-2"),)),
        "nodes": replace(here, nodes=(node, replace(node, id=1, cpus=()))),
    }[change]

    found, remark = merge_probe(other, saved)

    assert found == other
    assert "another machine" in remark


def test_a_missing_damaged_or_empty_probe_is_ignored(saved: Path, tmp_path: Path) -> None:
    here = unmeasured()
    assert merge_probe(here, tmp_path / "none.json") == (here, "")
    unmeasured().save(saved)
    assert merge_probe(here, saved) == (here, "")
    saved.write_text("{")
    found, remark = merge_probe(here, saved)
    assert found == here
    assert "is ignored" in remark


def test_the_cache_directory_follows_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "penstock" / "machine.json"


def test_a_probe_is_saved_for_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))

    assert "saved in" in save_probe(PROBED)
    assert merge_probe(unmeasured())[0].transfers == PROBED.transfers


def test_save_probe_reports_that_it_could_not_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert "not saved" in save_probe(PROBED)
