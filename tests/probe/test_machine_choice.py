"""The machine to plan for, and whether it runs compiled kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from penstock.machine.presets import DEFAULT, preset
from penstock.probe.machine_choice import has_kernels, machine_for_plan


@pytest.mark.parametrize(
    ("capability", "triton", "expected"),
    [((9, 0), True, True), ((8, 0), True, True), ((7, 5), True, False), ((9, 0), False, False)],
)
def test_kernels_need_triton_and_a_recent_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if triton else None)

    assert has_kernels() is expected
    assert has_kernels("cuda:1") is expected
    assert not has_kernels("cpu")


def test_without_a_gpu_the_default_preset_is_used_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probes = []

    def probe_here() -> object:
        probes.append(1)
        from dataclasses import replace

        return replace(preset("h200"), gpus=(), transfers=())

    for _ in range(2):  # the second time, from the cache
        machine, remark = machine_for_plan(None, probe_here)  # type: ignore[arg-type]
        assert machine.name == DEFAULT
        assert "No GPU found" in remark
    assert probes == [1]


def test_a_measured_machine_is_used_and_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine, remark = machine_for_plan(None, lambda: preset("h200"))

    assert machine.name == "h200"
    assert "as measured" in remark
