"""Gradients of models that their owner has prepared for other training loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from tests.support.adapters import adapted, lora

peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")


def train(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapter after two steps."""
    ids = torch.arange(3, 67).view(2, 32)
    with penstock.prepare(
        model, context=32, batch=2, lr=1e-2, dtype="fp32", device="cpu", self_check=False,
        budget={"hbm": "64MiB", "dram": "64MiB"},
    ) as engine:  # fmt: skip
        for _ in range(2):
            engine.step({"input_ids": ids, "labels": ids})
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def test_a_frozen_embedding_whose_output_needs_a_gradient_changes_no_bit() -> None:
    plain, hooked = (adapted("llama", lora(), dtype=torch.float32) for _ in range(2))
    hooked.enable_input_require_grads()
    before = {n: p.clone() for n, p in plain.named_parameters() if p.requires_grad}
    expected, found = train(plain), train(hooked)
    assert found.keys() == expected.keys() == before.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(expected[name], before[name]) for name in expected)
