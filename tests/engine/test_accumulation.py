"""Gradients that are accumulated over several calls are those of one large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.engine.prepare import prepare
from penstock.errors import EngineError
from tests.support.engines import plain_model, tiny_config

SMALL: dict[str, Any] = {
    "context": 32, "batch": 4, "micro_batch": 2, "device": "cpu", "accumulate": True,
    "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def engine_of_one_model() -> Engine:
    return prepare(plain_model(tiny_config("llama")), lr=1e-2, **SMALL)


def whole_batch() -> dict[str, torch.Tensor]:
    """Return four rows: the first two have few labels, the others many."""
    ids = torch.randint(3, 260, (4, 32), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:2, :28] = -100
    return {"input_ids": ids, "labels": labels}


def rows(batch: dict[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
    return {name: tensor[start : start + 2] for name, tensor in batch.items()}


def test_calls_without_num_items_average_over_the_tokens_of_all_batches() -> None:
    batch = whole_batch()
    with engine_of_one_model() as one, engine_of_one_model() as several:
        one.forward_backward(batch)
        one.apply()
        losses = [float(several.forward_backward(rows(batch, start))) for start in (0, 2)]
        several.apply()
        assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        assert losses[0] != losses[1]
        for name in one.state:
            # bf16 rounds gradients; with other weights of the batches, they would differ by half.
            expected, found = (e.state[name]["exp_avg"] for e in (one, several))
            assert float((found - expected).norm() / expected.norm()) < 0.02, name


def test_fp16_does_not_overflow_because_the_first_batch_has_few_tokens() -> None:
    """If all batches were divided by the first one's count, the second would be 15 times larger."""
    batch = whole_batch()
    batch["labels"][:2, :30] = -100
    model = plain_model(tiny_config("llama"))
    with prepare(model, dtype="fp16", lr=0.0, **SMALL) as engine:
        norms = []
        for starts in ((None,), (0, 2), (2, 0)):
            engine.scale.value = 65536.0
            for start in starts:
                engine.forward_backward(batch if start is None else rows(batch, start))
            engine.apply()
            assert not engine.skipped
            norms.append(engine.grad_norm)
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-3)


def test_an_update_counts_only_its_own_batches() -> None:
    batch = whole_batch()
    with engine_of_one_model() as engine, engine_of_one_model() as fresh:
        for start in (0, 2):
            engine.forward_backward(rows(batch, start))
        engine.optimizer.param_groups[0]["lr"] = engine.optimizer.param_groups[1]["lr"] = 0.0
        engine.apply()
        engine.forward_backward(rows(batch, 2))
        engine.apply()
        fresh.forward_backward(rows(batch, 2))
        fresh.apply()
        assert engine.grad_norm == fresh.grad_norm


def test_num_items_is_passed_to_all_calls_or_to_none() -> None:
    batch = whole_batch()
    with engine_of_one_model() as engine:
        engine.forward_backward(rows(batch, 0), num_items=70)
        with pytest.raises(EngineError, match=r"Pass it to all of them .* or to none"):
            engine.forward_backward(rows(batch, 2))
