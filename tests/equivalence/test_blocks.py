"""What lies before the first layer and after the last is differentiated like the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.roles import Role
from tests.equivalence.runs import DISK, DRAM, RESIDENT, Way, whole
from tests.support import engines
from tests.support.plain_loop import PlainLoop

TINY: dict[str, Any] = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CONFIGS = {
    # Scales its embeddings in place.
    "CTRL": transformers.CTRLConfig(
        n_embd=32, n_layer=3, n_head=4, n_positions=64, dff=64, resid_pdrop=0.0, embd_pdrop=0.0,
        **TINY,
    ),
}  # fmt: skip

PLAIN: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("way", [RESIDENT, DRAM, DISK], ids=["resident", "dram", "disk"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gradient_equals_that_of_the_plain_model(name: str, way: Way, tmp_path: Path) -> None:
    """Compare each tensor to 1 %: a tied table's two gradients are added in bf16 by torch."""
    config = CONFIGS[name]
    model, work = engines.inventory(config), engines.workload(batch=5, clip=None)
    plain = engines.plain_model(config)
    batch = engines.batches(1, work, config.vocab_size)[0]
    loop = PlainLoop(plain, micro_batch=2, clip=None, settings=PLAIN)
    expected, loss = loop.gradients(batch)
    disk = tmp_path if way is DISK else None
    plan = engines.make_plan_of(model, work, way.rows(len(model.blocks)), disk=disk)
    with engines.make_engine(config, plan, model, plain) as engine:
        assert float(engine.forward_backward(batch)) == pytest.approx(loss, rel=1e-5)
        gradients = {tensor: whole(engine, tensor, Role.GRADIENT).float() for tensor in expected}
    assert differing_gradients(gradients, expected) == []


def differing_gradients(
    gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[str]:
    """Return the names of tensors whose gradient differs by more than 1 %."""
    # Gradients of rounding error only, as that of a key's bias, cannot be compared.
    noise = 1e-6 * max(float(gradient.norm()) for gradient in expected.values())
    return [
        name
        for name, gradient in expected.items()
        if (gradients[name].view_as(gradient) - gradient).norm() > 0.01 * gradient.norm() + noise
    ]
