"""Pretend that this process runs on another machine."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock.machine.discovery
from penstock.machine.machine import Machine
from penstock.machine.presets import preset

_FIND_SPEC = importlib.util.find_spec


def pretend_to_be(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    *,
    torch_gpu: int | None = 0,
    triton: bool = True,
) -> None:
    """Make the kernel, the driver and torch report a machine.

    `torch_gpu` is the position of the GPU that torch uses, or None if it can use none.
    """

    def discover(storage: tuple[str, ...] = ()) -> Machine:
        paths = {s.path: s for s in machine.storage}
        return replace(machine, storage=tuple(paths[path] for path in storage))

    @functools.cache  # as in torch, which returns the same object for the same GPU
    def properties(ordinal: int) -> Any:
        assert torch_gpu is not None
        assert ordinal == 0, "torch lists one GPU"
        gpu = machine.gpus[torch_gpu]
        major, minor = gpu.capability_numbers or (9, 0)
        uuid = gpu.uuid.removeprefix("GPU-")
        return SimpleNamespace(uuid=uuid, major=major, minor=minor, total_memory=gpu.memory)

    def find_spec(name: str, *args: Any) -> object:
        return (object() if triton else None) if name == "triton" else _FIND_SPEC(name, *args)

    monkeypatch.setattr(penstock.machine.discovery, "discover", discover)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_gpu is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(torch_gpu is not None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def unmeasured(machine: Machine | None = None, **gpu: Any) -> Machine:
    """Return a machine as the kernel reports it, with changes to its GPU; by default an H200."""
    machine = machine or preset("h200")
    bare = dict.fromkeys(("matmul_flops", "block_flops", "compiled_flops", "attention_flops"))
    return replace(
        machine,
        nodes=tuple(replace(node, rates=()) for node in machine.nodes),
        gpus=tuple(replace(each, **{**bare, **gpu}) for each in machine.gpus),
        transfers=(),
        storage=tuple(replace(path, rates=()) for path in machine.storage),
    )
