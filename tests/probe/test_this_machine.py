"""The machine to plan for, and whether it runs compiled kernels."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from penstock.probe.this_machine import has_kernels


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
