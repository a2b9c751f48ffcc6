"""A model whose loss is not next-token cross-entropy is refused, unless the caller computes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

import penstock as ps
from penstock.errors import UnsupportedModelError
from tests.support import engines

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
BUDGET = {"hbm": "64MiB", "dram": "64MiB"}


class WithZLoss(LlamaForCausalLM):
    """Adds the square of the logits' normalizer to the loss, as some training recipes do."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).pow(2).mean()
        return output


def doubled(*args: Any, **kwargs: Any) -> Any:
    return 2 * ForCausalLMLoss(*args, **kwargs)


def with_z_loss() -> Any:
    model = engines.plain_model(engines.tiny_config("llama"), torch.float32)
    other = WithZLoss(model.config)
    other.load_state_dict(model.state_dict())
    return other


def with_function() -> Any:
    model: Any = engines.plain_model(engines.tiny_config("llama"), torch.float32)
    model.loss_function = doubled
    return model


def prepare(model: Any, **options: Any) -> Any:
    return ps.prepare(
        model, context=12, batch=2, dtype="fp32", budget=BUDGET, self_check=False, **options
    )


@pytest.mark.parametrize(
    ("make", "named"), [(with_z_loss, "WithZLoss"), (with_function, "set to doubled")]
)
def test_prepare_refuses_a_model_with_another_loss(make: Any, named: str) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        prepare(model)
    assert "penstock.stream" in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("make", [with_z_loss, with_function])
def test_stream_trains_with_the_models_own_loss(make: Any) -> None:
    model = make()
    expected = float(model(**BATCH).loss.detach())
    streamed, _ = ps.stream(model, tokens=64, dtype="fp32", budget=BUDGET, self_check=False)
    try:
        assert float(streamed(**BATCH).loss.detach()) == pytest.approx(expected, rel=1e-6)
    finally:
        streamed.close()


def test_a_loss_that_the_caller_passes_takes_the_place_of_the_models() -> None:
    def loss(values: torch.Tensor, *_: Any) -> torch.Tensor:
        return -values.sum()

    with prepare(with_z_loss(), loss=loss) as engine:
        assert bool(torch.isfinite(engine.step(BATCH)))


def test_the_default_loss_function_may_be_set_again() -> None:
    model: Any = engines.plain_model(engines.tiny_config("llama"), torch.float32)
    model.loss_function = ForCausalLMLoss
    with prepare(model) as engine:
        assert bool(torch.isfinite(engine.step(BATCH)))
