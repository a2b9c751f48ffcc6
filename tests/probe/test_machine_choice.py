"""The machine to plan for, and whether it runs compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import EngineError, PlanError
from penstock.machine.presets import DEFAULT, preset
from penstock.machine.probe_cache import save_probe
from penstock.probe.machine_choice import machine_to_plan_for, runs_kernels, this_machine
from tests.support.pretend_machine import pretend_to_be, unmeasured

H200 = preset("h200")

Discovered = Callable[..., None]


@pytest.fixture
def discovered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Discovered:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return partial(pretend_to_be, monkeypatch)


# Kernels.


@pytest.mark.parametrize(
    ("capability", "triton", "expected"),
    [("9.0", True, True), ("8.0", True, True), ("7.5", True, False), ("12.0", True, True),
     ("9.0", False, False)],
)  # fmt: skip
def test_plan_and_train_agree_on_kernels(
    discovered: Discovered, capability: str, triton: bool, expected: bool
) -> None:
    discovered(unmeasured(capability=capability), triton=triton)

    assert this_machine().kernels is expected
    assert this_machine("cuda:0").kernels is expected
    assert machine_to_plan_for(None).kernels is expected
    assert not this_machine("cpu").kernels


def test_a_machine_file_decides_about_kernels_by_its_compute_capability(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for capability, expected in (("7.0", False), ("8.9", True), ("", True)):
        unmeasured(capability=capability).save(path)
        assert machine_to_plan_for(str(path)).kernels is expected
    assert not runs_kernels(replace(H200, gpus=(), transfers=()))


# This machine.


def test_plan_and_train_describe_this_machine_in_the_same_way(discovered: Discovered) -> None:
    save_probe(H200)
    discovered(unmeasured(free=50 << 30))

    planned, trained = machine_to_plan_for(None), this_machine()

    assert planned.machine == trained.machine
    assert planned.is_here
    assert trained.machine.gpus[0].free == 50 << 30
    assert trained.machine.gpus[0].block_flops == H200.gpus[0].block_flops
    assert trained.remark in planned.remark


@pytest.mark.parametrize("change", ["another GPU", "more memory"])
def test_a_probe_of_another_machine_is_used_by_neither(discovered: Discovered, change: str) -> None:
    save_probe(H200)
    here = unmeasured(uuid="GPU-other") if change == "another GPU" else unmeasured()
    if change == "more memory":
        node = here.nodes[0]
        here = replace(here, nodes=(replace(node, capacity=2 * node.capacity), *here.nodes[1:]))
    discovered(here)

    planned, trained = machine_to_plan_for(None), this_machine()

    assert planned.machine == trained.machine
    assert trained.machine.gpus[0].block_flops is None
    assert "another machine" in planned.remark
    assert "another machine" in trained.remark


def test_the_speeds_of_another_drive_are_used_by_neither(
    discovered: Discovered, tmp_path: Path
) -> None:
    (storage,) = H200.storage[:1]
    drive = replace(storage, path=str(tmp_path), model="first", capacity=10**12, free=10**11)
    save_probe(replace(H200, storage=(drive,)))
    discovered(replace(unmeasured(), storage=(replace(drive, rates=(), free=7),)))
    assert this_machine().machine.storage == (replace(drive, free=7),)

    discovered(replace(unmeasured(), storage=(replace(drive, rates=(), model="second"),)))

    for found in (this_machine(), machine_to_plan_for(None)):
        assert not found.machine.storage[0].rates
        assert f"speeds of {tmp_path} are ignored" in found.remark


def test_the_gpu_that_torch_uses_comes_first(discovered: Discovered) -> None:
    gpu = replace(H200.gpus[0], uuid="GPU-a")
    two = replace(unmeasured(), gpus=(gpu, replace(gpu, index=1, uuid="GPU-b", free=1 << 30)))
    discovered(two, torch_gpu=1)

    assert [gpu.uuid for gpu in this_machine().machine.gpus] == ["GPU-b", "GPU-a"]


def test_gpus_are_in_the_order_of_torch_whose_first_ones_the_ranks_use(
    discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    gpus = tuple(
        replace(H200.gpus[0], index=i, uuid=f"GPU-{name}") for i, name in enumerate("abcd")
    )
    discovered(replace(unmeasured(), gpus=gpus), torch_gpu=0)
    seen = ["c", "a", "d"]  # CUDA_VISIBLE_DEVICES=2,0,3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))

    def properties(ordinal: int) -> Any:
        return SimpleNamespace(uuid=seen[ordinal], total_memory=1, major=9, minor=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    found = [gpu.uuid for gpu in this_machine().machine.gpus]
    assert found == ["GPU-c", "GPU-a", "GPU-d", "GPU-b"], "what torch does not list comes last"
    other = [gpu.uuid for gpu in this_machine("cuda:1").machine.gpus]
    assert other == ["GPU-a", "GPU-c", "GPU-d", "GPU-b"]


def test_without_a_gpu_plan_uses_the_default_preset_and_says_what_train_does(
    discovered: Discovered,
) -> None:
    discovered(replace(H200, gpus=(), transfers=()))

    target = machine_to_plan_for(None)
    assert target.machine == preset(DEFAULT)
    assert not target.is_here
    assert "`penstock train` would compute on the CPU here" in target.remark
    assert "--machine this" in target.remark


@pytest.mark.parametrize("gpus", [H200.gpus, ()])
def test_this_plans_for_the_cpu_if_torch_sees_no_gpu(
    discovered: Discovered, gpus: tuple[Any, ...]
) -> None:
    discovered(replace(unmeasured(), gpus=gpus), torch_gpu=None)

    planned, trained = machine_to_plan_for("this"), this_machine()

    assert planned.machine == trained.machine
    assert not planned.machine.gpus
    assert "was not measured" in planned.remark or "were not measured" in planned.remark


def test_a_gpu_that_is_not_there_cannot_be_requested(discovered: Discovered) -> None:
    discovered(replace(H200, gpus=(), transfers=()))

    with pytest.raises(EngineError, match="the driver reports no GPU"):
        this_machine("cuda")


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(PlanError, match="nowhere is neither a machine file nor a preset"):
        machine_to_plan_for("nowhere")
