"""Chunks, tiles and dropout change results within bounds, and the plan changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.model.split import SplitModel
from tests.equivalence.runs import FEW, RESIDENT, Setup, differing, train
from tests.support.samples import sample

STEPS = 4


def assert_same_under_plans(setup: Setup, disk: Path) -> list[float]:
    results = [train(setup, way, disk, steps=STEPS) for way in FEW]
    for other in results[1:]:
        assert other.losses == results[0].losses
        assert differing(results[0].state, other.state) == []
    return results[0].losses


def assert_near(first: Setup, second: Setup, disk: Path) -> None:
    """Compare losses and gradient norms within rounding errors.

    Products of fewer rows may sum in another order, and each part's gradient is rounded to bf16
    before the parts are summed in fp32: a relative error of 2^-9 per part, of either sign.
    """
    one, other = (train(setup, RESIDENT, disk, steps=STEPS) for setup in (first, second))
    assert one.losses == pytest.approx(other.losses, rel=1e-3)
    assert one.norms == pytest.approx(other.norms, rel=2.0**-7)


def test_loss_chunks_change_little(tmp_path: Path) -> None:
    """Compare chunks of 7 tokens, which do not divide a row, with one chunk.

    `test_plans.py` tests that the plan changes nothing.
    """
    cut, whole = Setup.of("llama", loss_chunk=7), Setup.of("llama")

    assert_near(cut, whole, tmp_path)


def test_label_smoothing_is_the_same_under_every_plan(tmp_path: Path) -> None:
    losses = assert_same_under_plans(Setup.of("llama", label_smoothing=0.1, loss_chunk=7), tmp_path)

    without = train(Setup.of("llama", loss_chunk=7), RESIDENT, tmp_path, steps=STEPS)
    assert all(one != other for one, other in zip(losses, without.losses, strict=True))


def test_mlp_tiles_change_little_and_the_plan_nothing(tmp_path: Path) -> None:
    cut, whole = Setup.of("llama", mlp_tile=10), Setup.of("llama")

    assert_same_under_plans(cut, tmp_path)
    assert_near(cut, whole, tmp_path)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_dropout": 0.2}),
        ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
    ],
)
def test_dropout_is_the_same_under_every_plan(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    losses = assert_same_under_plans(Setup.of(family, config=config), tmp_path)

    without = train(Setup.of(family), RESIDENT, tmp_path, steps=STEPS)
    assert losses != without.losses


@pytest.mark.parametrize("family", sample(["llama", "bloom"], ["bloom"]))
def test_noise_on_embeddings_is_the_same_under_every_plan(family: str, tmp_path: Path) -> None:
    """Bloom normalizes its embedding, so backward needs the noise of forward again."""
    setup = Setup.of(family, freeze=(), neftune_noise_alpha=5.0)
    losses = assert_same_under_plans(setup, tmp_path)

    without = train(Setup.of(family, freeze=()), RESIDENT, tmp_path, steps=STEPS)
    assert all(one != other for one, other in zip(losses, without.losses, strict=True))


def test_backward_replays_the_dropout_of_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recomputation in backward gives the output of forward."""
    setup = Setup.of("gpt2", config={"resid_pdrop": 0.2, "attn_pdrop": 0.2}, micro_batch=5)
    seen: dict[int, list[torch.Tensor]] = {}
    plain = SplitModel.routed_layer

    def spy(self: SplitModel, index: int, *args: Any) -> Any:
        out, routing = plain(self, index, *args)
        seen.setdefault(index, []).append(out.detach().clone())
        return out, routing

    monkeypatch.setattr(SplitModel, "routed_layer", spy)
    with setup.engine(RESIDENT, tmp_path) as engine:
        engine.forward_backward(setup.batches(1)[0])

    assert len(seen) == 3
    for forth, back in seen.values():
        assert torch.equal(forth, back)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_evaluation_uses_no_dropout(family: str, tmp_path: Path) -> None:
    rates = {"attention_dropout": 0.5} if family == "llama" else {
        "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}  # fmt: skip
    dropping, plain = Setup.of(family, config=rates), Setup.of(family)
    found = []
    for setup in (dropping, plain):
        with setup.engine(RESIDENT, tmp_path) as engine:
            found.append(engine.evaluate(setup.batches(1)).loss)

    assert found[0] == found[1]


def test_a_model_in_eval_mode_is_still_trained_with_dropout(tmp_path: Path) -> None:
    """`from_pretrained` returns models in eval mode."""
    from penstock.engine.prepare import prepare

    losses = []
    for training in (True, False):
        setup = Setup.of("llama", config={"attention_dropout": 0.5})
        setup.source.train(training)
        with prepare(
            setup.source, budget={"hbm": "1GiB", "dram": "1GiB"}, context=16, batch=5, device="cpu"
        ) as engine:
            losses.append(float(engine.step(setup.batches(1)[0])))

    assert losses[0] == losses[1]
