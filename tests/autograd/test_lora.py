"""An adapter of PEFT in a streamed model, whose frozen weights are also the reference of DPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import penstock as ps
from penstock.errors import EngineError
from tests.autograd.test_own_loop import SMALL, log_probs, one_group, padded_batch
from tests.support.engines import plain_model, tiny_config

peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")


def adapted() -> Any:
    model = plain_model(tiny_config("llama"), torch.float32)
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def dpo_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = log_probs(model, batch).chunk(2)
    with torch.no_grad(), model.disable_adapter():
        ref_chosen, ref_rejected = log_probs(model, batch).chunk(2)
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -functional.logsigmoid(0.1 * margin).mean()


@pytest.mark.long
def test_dpo_with_adapters_off_as_the_reference_equals_plain_torch() -> None:
    plain = adapted()
    trained = [p for p in plain.parameters() if p.requires_grad]
    torch_optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
    model, optimizer = ps.stream(adapted(), **(SMALL | {"lr": 1e-2, "param_groups": one_group}))
    losses = []
    for step in range(10):
        for one, updates in ((model, optimizer), (plain, torch_optimizer)):
            loss = dpo_loss(one, padded_batch(step))
            loss.backward()
            updates.step()
            updates.zero_grad()
            losses.append(loss.item())
        assert losses[-2] == pytest.approx(losses[-1], rel=1e-5), step
    assert losses[0] == pytest.approx(0.6931472, rel=1e-6)  # the reference is the model at first
    assert losses[-1] != pytest.approx(0.6931472, rel=1e-4)
    model.base_model.model.close()
    expected = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    found = dict(model.named_parameters())
    assert all(torch.allclose(found[n], p, atol=1e-5) for n, p in expected.items())


def test_an_adapter_that_is_added_later_is_refused() -> None:
    model, _ = ps.stream(adapted(), **SMALL)
    model.add_adapter("ref", model.peft_config["default"])
    with pytest.raises(EngineError, match=r"before penstock\.stream"):
        model(**padded_batch(0))
