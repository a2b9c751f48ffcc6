"""Model families, packed documents, sliding windows and logit caps equal the plain model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.runs import DISK, DRAM, RESIDENT, Setup, differing, state_of
from tests.support import engines
from tests.support.plain_loop import PlainLoop

OTHERS = ("mistral", "qwen2", "olmo2", "phi3", "gpt_neox", "gpt2", "gemma2")


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("family", OTHERS)
def test_a_step_of_every_family_equals_the_plain_loop(family: str, tmp_path: Path) -> None:
    """Bit for bit. Gemma 2's capped attention is transformers' eager one in both cases."""
    setup = Setup.of(family, freeze=(), config=CONFIGS.get(family))
    loop = PlainLoop(setup.source, micro_batch=2, clip=setup.work.clip, settings=SETTINGS)
    batches = setup.batches(2)
    with setup.engine(DISK, tmp_path, optimizer=SETTINGS) as engine:
        for batch in batches:
            assert float(engine.step(batch)) == pytest.approx(loop.step(batch), rel=1e-6)
            assert engine.grad_norm == loop.grad_norm

        assert differing(state_of(engine), loop.whole_state()) == []


CONFIGS = {"mistral": {"sliding_window": None}}


@pytest.mark.parametrize("plan", [DISK, DRAM, RESIDENT], ids=["disk", "dram", "resident"])
def test_a_head_without_a_tensor_of_its_own(plan: Any, tmp_path: Path) -> None:
    """OLMo's norms have no weights: a tied head owns nothing, and its block has no role at all."""
    setup = Setup.of("olmo", freeze=(), config={"tie_word_embeddings": True})
    assert not setup.model.blocks[-1].tensors
    loop = PlainLoop(setup.source, micro_batch=2, clip=setup.work.clip, settings=SETTINGS)
    with setup.engine(plan, tmp_path, optimizer=SETTINGS) as engine:
        for batch in setup.batches(2):
            assert float(engine.step(batch)) == pytest.approx(loop.step(batch), rel=1e-4)
            # Not to the bit: torch adds both gradients of a tied table in bf16.
            assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=1e-4)


PACKED = [("llama", {}), ("gemma3", {"sliding_window": 3}), ("gemma2", {"sliding_window": 3}),
          ("gpt2", {})]  # fmt: skip
BOUNDS = (0, 5, 6, 16)
"""Boundaries of three documents in a row of sixteen tokens; one is a single token."""


def loss_of(engine: Any, batch: dict[str, torch.Tensor], low: int, high: int) -> float:
    """Return the loss of the documents in those columns, with the others still in the batch."""
    labels = torch.full_like(batch["labels"], -100)
    labels[:, low:high] = batch["input_ids"][:, low:high]
    return float(engine.evaluate([batch | {"labels": labels}]).loss)


def packed_batch(setup: Setup) -> dict[str, torch.Tensor]:
    batch = setup.batches(1)[0]
    lengths = [high - low for low, high in itertools.pairwise(BOUNDS)]
    row = torch.cat([torch.arange(length) for length in lengths])
    return batch | {"position_ids": row.expand_as(batch["input_ids"]).clone()}


@pytest.mark.parametrize(("family", "config"), PACKED, ids=[f for f, _ in PACKED])
def test_packed_documents_do_not_see_each_other(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    setup = large_weights_setup(family, config)
    batch = packed_batch(setup)
    with setup.engine(DRAM, tmp_path) as engine:
        first, last = loss_of(engine, batch, 0, 5), loss_of(engine, batch, 6, 16)
        for changed, (kept, low, high) in ((slice(0, 6), (last, 6, 16)),
                                           (slice(5, 16), (first, 0, 5))):  # fmt: skip
            other = {k: v.clone() for k, v in batch.items()}
            other["input_ids"][:, changed] = 7
            assert loss_of(engine, other, low, high) == kept

        for low, high, packed in ((0, 5, first), (6, 16, last)):
            alone = {k: batch[k][:, low:high] for k in ("input_ids", "labels")}
            # Matrix products of other shapes may sum in another order: a few last bits of bf16.
            assert packed == pytest.approx(loss_of(engine, alone, 0, high - low), rel=2e-3)


def test_a_packed_step_equals_separate_documents(tmp_path: Path) -> None:
    """The gradient norm equals that of a batch with each document in a row of its own."""
    setup = large_weights_setup("llama", {}, batch=2, micro_batch=2)
    batch = packed_batch(setup)
    with setup.engine(DRAM, tmp_path) as engine:
        packed = float(engine.forward_backward(batch))
        engine.apply()
        norm = engine.grad_norm
    rows = large_weights_setup("llama", {}, batch=4, micro_batch=4)
    ids = torch.zeros(4, 10, dtype=torch.int64)
    labels = torch.full((4, 10), -100)
    for at, (low, high) in enumerate(((0, 5), (6, 16))):
        for row in range(2):
            ids[2 * at + row, : high - low] = batch["input_ids"][row, low:high]
            labels[2 * at + row, : high - low] = batch["labels"][row, low:high]
    with rows.engine(DRAM, tmp_path) as engine:
        apart = float(engine.step({"input_ids": ids, "labels": labels}))
        assert packed == pytest.approx(apart, rel=2e-3)
        assert norm == pytest.approx(engine.grad_norm, rel=1e-2)


def large_weights_setup(family: str, config: dict[str, Any], **work: Any) -> Setup:
    """Return a setup whose weights are large enough for attention to matter."""
    return Setup.of(family, freeze=(), config={"initializer_range": 0.25} | config, **work)


EAGER = {
    "a window in Mistral": ("mistral", {"sliding_window": 4}, {"sliding_window": None}),
    "windows in some layers of Gemma 3": (
        "gemma3", {"sliding_window": 2, "query_pre_attn_scalar": 1}, {"sliding_window": 128},
    ),
    "capped scores and logits in Gemma 2": (
        "gemma2",
        # The scale is not that of the head's width, which is 8.
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 4,
         "query_pre_attn_scalar": 2},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "config", "without"), EAGER.values(), ids=EAGER)
def test_windows_and_caps_equal_those_of_transformers(
    family: str, config: dict[str, Any], without: dict[str, Any], tmp_path: Path
) -> None:
    """Compare loss and gradient with transformers' eager attention with a mask.

    Both round to bf16 after every product, but the bands here have other shapes.
    """
    losses = []
    for changes in (config, config | without):
        setup = large_weights_setup(family, changes)
        eager = engines.plain_model(setup.config)
        eager.set_attn_implementation("eager")
        loop = PlainLoop(eager, micro_batch=2, clip=None, settings={"weight_decay": 0.0, "lr": 0.0,
                         "betas": (0.9, 0.95), "eps": 1e-8})  # fmt: skip
        batch = setup.batches(1)[0]
        with setup.engine(RESIDENT, tmp_path) as engine:
            losses.append(float(engine.step(batch)))
            assert losses[-1] == pytest.approx(loop.step(batch), rel=1e-3)
            assert engine.grad_norm == pytest.approx(loop.grad_norm, rel=2e-2)
    # Without the window or the cap, the loss would differ by more than the tolerance.
    assert abs(losses[0] / losses[1] - 1) > 2e-3
