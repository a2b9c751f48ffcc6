"""Mixtures of experts: every plan gives the same bits, and losses are those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.engine.optimizer import decay_matrices
from penstock.errors import UnsupportedModelError
from tests.equivalence.runs import DRAM, FEW, KEPT, RESIDENT, WAYS, Setup, Way, differing, train
from tests.equivalence.test_plans import assert_same, train_each
from tests.equivalence.test_ranks import train_on_ranks
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
        pytest.param("olmoe", (*FEW, KEPT[1]), 3, id="olmoe, few"),
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


def test_the_auxiliary_loss_reaches_the_router_of_every_layer(tmp_path: Path) -> None:
    config = {"initializer_range": 0.2}
    with_loss = experts_setup("olmoe", dtype="fp32")
    without = Setup.of("olmoe", freeze=(), config=config, dtype="fp32")
    first, second = (train(each, DRAM, tmp_path, steps=1) for each in (with_loss, without))

    assert first.losses[0] > second.losses[0] + 0.4
    routers = [name for name in first.state if ".mlp.gate.weight" in name and "first" in name]
    assert len(routers) == 3
    assert all(not torch.equal(first.state[name], second.state[name]) for name in routers)


@pytest.mark.parametrize("way", [RESIDENT, WAYS[8]], ids=["resident", "three rounds on disk"])
def test_the_load_counts_every_choice_of_every_token(way: Way, tmp_path: Path) -> None:
    setup = experts_setup("qwen3_moe")
    with setup.engine(way, tmp_path) as engine:
        engine.step(setup.batches(1)[0])
        rows, load = engine._expert_rows, engine.expert_load()

    assert load is not None
    assert list(rows) == [2], "only the second layer has experts"
    assert int(rows[2].sum()) == 2 * setup.work.tokens
    assert load.largest == pytest.approx(8 * int(rows[2].max()) / (2 * setup.work.tokens))


def test_a_prepared_model_has_the_loss_of_transformers_and_passes_its_checks() -> None:
    """The survey, the verdict on a twin and the self-check accept routers with a loss."""
    setup = experts_setup("olmoe", dtype="fp32", batch=2)
    batch = setup.batches(1)[0]
    expected = float(setup.source(**batch, use_cache=False).loss.detach())

    with penstock.prepare(
        setup.source, budget={"hbm": "1GiB", "dram": "1GiB"}, context=16, batch=2, device="cpu",
        dtype="fp32", compiled=False, steps=2, lr=1e-3,
    ) as engine:  # fmt: skip
        assert float(engine.step(batch)) == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_the_callers_refuses_the_auxiliary_loss() -> None:
    setup = experts_setup("olmoe", dtype="fp32")

    with pytest.raises(UnsupportedModelError, match="output_router_logits is on"):
        penstock.stream(setup.source, tokens=32, budget={"hbm": "1GiB", "dram": "1GiB"})


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param("olmoe", WAYS[3], id="olmoe"),
        pytest.param("qwen3_moe", WAYS[8], id="qwen3_moe", marks=pytest.mark.long),
    ],
)
def test_two_ranks_give_the_bits_of_one(family: str, way: Way, tmp_path: Path) -> None:
    """With the auxiliary loss: each rank has the router sums of its own micro-batches."""
    setup = experts_setup(family)
    batches = setup.batches(2)
    one = train_on_ranks(setup, RESIDENT, tmp_path, 1, batches)

    two = train_on_ranks(setup, way, tmp_path, 2, batches)

    assert two.losses == one.losses
    assert two.norms == one.norms
    assert differing(one.state, two.state) == []
