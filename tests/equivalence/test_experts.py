"""Mixtures of experts: every plan gives the same bits, and losses are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.optimizer import decay_matrices
from tests.equivalence.runs import DISK, DRAM, FEW, RESIDENT, WAYS, Setup, Way, train
from tests.equivalence.test_plans import assert_same, train_each
from tests.support.engines import EXPERTS

BALANCED = ("olmoe", "qwen3_moe", "mixtral", "gpt_oss")
"""Families whose class adds an auxiliary loss to the loss."""

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def experts_setup(family: str, **work: Any) -> Setup:
    """Return a setup with an auxiliary loss that is a good part of the loss."""
    config: dict[str, Any] = {"initializer_range": 0.2}
    if family in BALANCED:
        config |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return Setup.of(family, freeze=(), config=config, **work)


@pytest.mark.parametrize(
    ("family", "ways", "steps"),
    [
        pytest.param("olmoe", FEW, 3, id="olmoe, few"),
        pytest.param("deepseek_v3", (RESIDENT, WAYS[8]), 2, id="deepseek_v3, few"),
        *(pytest.param(f, WAYS, 20, id=f, marks=pytest.mark.long) for f in EXPERTS),
    ],
)
def test_experts_are_the_same_to_the_bit_under_every_plan(
    family: str, ways: tuple[Way, ...], steps: int, tmp_path: Path
) -> None:
    setup = experts_setup(family)

    results = train_each(setup, ways, tmp_path, steps=steps)

    assert_same(results)


@pytest.mark.parametrize(
    ("family", "tile"),
    [
        pytest.param("olmoe", 4096, id="olmoe"),
        *(pytest.param(f, 4096, id=f, marks=pytest.mark.long) for f in (*EXPERTS,)[1:]),
        *(pytest.param(f, 5, id=f"{f}, tiles", marks=pytest.mark.long) for f in EXPERTS),
    ],
)
def test_twenty_steps_have_the_losses_of_transformers(
    family: str, tile: int, tmp_path: Path
) -> None:
    """In fp32, with the auxiliary loss, three micro-batches and padded rows."""
    setup = experts_setup(family, dtype="fp32", mlp_tile=tile)
    batches = [padded(batch) for batch in setup.batches(20)]

    expected = train_plain(setup, copy.deepcopy(setup.source), batches)
    with setup.engine(DRAM, tmp_path, optimizer=SETTINGS) as engine:
        losses = [float(engine.step(batch)) for batch in batches]

    assert losses == pytest.approx(expected, rel=1e-5)


def padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch whose rows end with up to four tokens of padding."""
    mask = torch.ones_like(batch["input_ids"])
    for row in range(mask.shape[0]):
        mask[row, mask.shape[1] - row :] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return {"input_ids": batch["input_ids"], "labels": labels, "attention_mask": mask}


def train_plain(setup: Setup, model: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Train with transformers and torch; the loss of a step is the mean over its tokens."""
    groups = decay_matrices(model.named_parameters())
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **SETTINGS)  # type: ignore[arg-type]
    losses, size = [], setup.work.numerics.micro_batch
    for batch in batches:
        total, items = 0.0, int((batch["labels"][:, 1:] != -100).sum())
        for low in range(0, setup.work.batch, size):
            micro = {name: each[low : low + size] for name, each in batch.items()}
            share = int((micro["labels"][:, 1:] != -100).sum()) / items
            loss = model(**micro, use_cache=False).loss * share
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.work.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_the_auxiliary_loss_reaches_every_router(tmp_path: Path) -> None:
    """Without labels that count in a row, its routers get no gradient at all from it."""
    setup = experts_setup("olmoe", dtype="fp32")
    quiet = Setup.of("olmoe", freeze=(), config={"initializer_range": 0.2}, dtype="fp32")
    with_loss = train(setup, DISK, tmp_path, steps=1, optimizer=SETTINGS)
    without = train(quiet, DISK, tmp_path, steps=1, optimizer=SETTINGS)

    assert with_loss.losses[0] > without.losses[0] + 0.4
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.gate.weight first"
        found = next(k for k in with_loss.state if k.startswith(name.rpartition(" ")[0]))
        assert not torch.equal(with_loss.state[found], without.state[found])
