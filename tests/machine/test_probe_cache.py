"""A kept probe lends its speeds to the machine it was taken on, and to no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.machine.machine import Machine
from penstock.machine.presets import preset
from penstock.machine.probe_cache import cache_path, merge_probe, save_probe
from penstock.units import GiB

PROBED = preset("h200")


def looked_at(probed: Machine = PROBED) -> Machine:
    """The same machine without anything measured, and with less of it free."""
    return replace(
        probed,
        nodes=tuple(replace(node, rates=(), free=GiB) for node in probed.nodes),
        gpus=tuple(
            replace(gpu, matmul_flops=None, block_flops=None, free=2 * GiB) for gpu in probed.gpus
        ),
        transfers=(),
        storage=(),
    )


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    PROBED.save(path)
    return path


def test_speeds_are_the_probes_and_what_is_free_is_todays(kept: Path) -> None:
    found, remark = merge_probe(looked_at(), kept)

    assert found.nodes[0].rates == PROBED.nodes[0].rates
    assert found.nodes[0].free == GiB
    assert found.gpus[0].block_flops == PROBED.gpus[0].block_flops
    assert found.gpus[0].free == 2 * GiB
    assert found.transfers == PROBED.transfers
    assert found.storage[0].rates == PROBED.storage[0].rates
    assert str(kept) in remark


@pytest.mark.parametrize("change", ["cpu", "memory", "gpu", "nodes"])
def test_a_probe_of_another_machine_is_left_alone(kept: Path, change: str) -> None:
    here = looked_at()
    node, gpu = here.nodes[0], here.gpus[0]
    other = {
        "cpu": replace(here, cpu=replace(here.cpu, model="another")),
        "memory": replace(here, nodes=(replace(node, capacity=2 * node.capacity),)),
        "gpu": replace(here, gpus=(replace(gpu, uuid="GPU-2"),)),
        "nodes": replace(here, nodes=(node, replace(node, id=1, cpus=()))),
    }[change]

    found, remark = merge_probe(other, kept)

    assert found == other
    assert "another machine" in remark


def test_no_file_a_damaged_one_and_one_without_speeds(kept: Path, tmp_path: Path) -> None:
    here = looked_at()
    assert merge_probe(here, tmp_path / "none.json") == (here, "")
    looked_at().save(kept)
    assert merge_probe(here, kept) == (here, "")
    kept.write_text("{")
    found, remark = merge_probe(here, kept)
    assert found == here
    assert "is not used" in remark


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "penstock" / "machine.json"


def test_a_probe_is_kept_for_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))

    assert "kept in" in save_probe(PROBED)
    assert merge_probe(looked_at())[0].transfers == PROBED.transfers


def test_where_nothing_can_be_kept_the_probe_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert "not kept" in save_probe(PROBED)
