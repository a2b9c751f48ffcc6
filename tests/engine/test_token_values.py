"""What an engine says about each token besides the loss: entropy, hits and logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.engine import loss as loss_module
from penstock.engine.engine import Engine
from penstock.engine.loss import TokenValues
from penstock.engine.prepare import prepare
from penstock.errors import EngineError
from tests.support.trainers import tiny_model

ROWS, LENGTH = 5, 20


@pytest.fixture
def model() -> Any:
    return tiny_model()


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    settings: Any = {"context": 32, "batch": ROWS, "micro_batch": 2, "dtype": "fp32", "lr": 0.0}
    budget = {"hbm": "64MiB", "dram": "64MiB"}
    with prepare(model, self_check=False, device="cpu", budget=budget, **settings) as made:
        yield made


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 260, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def expected_logits() -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = tiny_model()(batch()["input_ids"]).logits
    return logits


def test_logits_are_those_of_the_model(engine: Engine) -> None:
    torch.testing.assert_close(engine.logits(batch()), expected_logits(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_entropy_and_hits_of_each_token(engine: Engine, training: bool) -> None:
    engine.keeps_token_values = True
    made = batch()
    best = expected_logits().argmax(-1)
    made["labels"][:, 1:7] = best[:, :6]  # six tokens of each row are predicted
    if training:
        engine.forward_backward(made)
    else:
        engine.evaluate([made])
    (values,) = engine.token_values
    logits = expected_logits()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(values.entropy, entropy, rtol=1e-4, atol=1e-5)
    hits = torch.zeros(ROWS, LENGTH)
    hits[:, :-1] = (best[:, :-1] == made["labels"][:, 1:]).float()
    assert (values.is_top == hits).all()
    assert float(values.is_top.sum()) >= 6 * ROWS


def test_nothing_is_kept_unless_it_is_asked_for(engine: Engine) -> None:
    engine.forward_backward(batch())
    assert engine.token_values == []


def test_values_are_computed_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_VALUES_NBYTES", 4 * 7 * 3)
    logits = torch.randn(8, 7, generator=torch.Generator().manual_seed(0))
    logits[2, 3] = -torch.inf  # its probability is 0, and so is its part of the entropy
    targets = logits.argmax(-1)
    targets[5] = -100
    values = TokenValues.empty(10, torch.device("cpu"))
    values.entropy.fill_(-1)
    values.fill(slice(1, 9), logits, targets)
    probabilities = logits.double().softmax(-1)
    wanted = torch.special.entr(probabilities).sum(-1).float()
    torch.testing.assert_close(values.entropy[1:9], wanted)
    assert values.entropy[[0, 9]].tolist() == [-1, -1]
    assert values.is_top[1:9].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_the_norm_is_known_before_the_update(engine: Engine) -> None:
    with pytest.raises(EngineError, match="call forward_backward"):
        _ = engine.waiting_grad_norm
    engine.forward_backward(batch(), num_items=17)
    norm = engine.waiting_grad_norm
    engine.apply()
    assert norm == engine.grad_norm > 0


def test_accumulated_gradients_have_no_norm_before_the_update(model: Any) -> None:
    settings: Any = {"context": 32, "batch": ROWS, "device": "cpu", "accumulate": True}
    budget = {"hbm": "64MiB", "dram": "64MiB"}
    with prepare(model, self_check=False, budget=budget, **settings) as engine:
        engine.forward_backward(batch())
        with pytest.raises(EngineError, match="read grad_norm after apply"):
            _ = engine.waiting_grad_norm
