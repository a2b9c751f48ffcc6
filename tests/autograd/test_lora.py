"""An adapter of PEFT in a streamed model, whose frozen weights are also the reference of DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import penstock as ps
from penstock.errors import EngineError, UnsupportedModelError
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
    with pytest.raises(UnsupportedModelError, match="second has another config"):
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
    model.peft_config["second"] = model.peft_config["default"]
    model.base_model.inject_adapter(model.base_model.model, "second")
    with pytest.raises(EngineError, match=r"before penstock\.stream"):
        model(**padded_batch(0))
    model.close()


def test_a_copy_of_a_new_adapter_is_the_model_with_the_adapter_off() -> None:
    """TRL adds the copy to a model without a reference model, and copies the values."""
    model, optimizer = ps.stream(adapted(), **SMALL)
    model.add_adapter("ref", model.peft_config["default"])
    named = [name for name, _ in model.named_parameters() if ".default." in name]
    for name in named:
        model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(None)
    assert named
    assert model.get_parameter(named[0]).shape
    assert "ref" not in model.peft_config  # so that TRL switches the adapter off
    dpo_loss(model, padded_batch(0)).backward()
    optimizer.step()
    with pytest.raises(UnsupportedModelError, match="is not zero"):
        model.add_adapter("ref", model.peft_config["default"])
    model.base_model.model.close()
    assert "add_adapter" not in vars(model)


def test_a_trainer_may_move_and_save_the_peft_model(tmp_path: Path) -> None:
    model, _ = ps.stream(adapted(), **SMALL)
    assert model.to("cpu") is model
    with pytest.raises(EngineError, match="cannot be moved"):
        model.to(torch.float16)
    model.save_pretrained(tmp_path)
    model.close()
    base = plain_model(tiny_config("llama"), torch.float32)
    saved = dict(peft.PeftModel.from_pretrained(base, tmp_path).named_parameters())
    found = {n: p for n, p in model.named_parameters() if ".lora_" in n}
    assert found
    assert all(torch.equal(saved[name], tensor) for name, tensor in found.items())


def test_the_state_dict_of_the_peft_model_has_its_names() -> None:
    expected = adapted().state_dict()
    model, _ = ps.stream(adapted(), **SMALL)
    found, adapter = model.state_dict(), peft.get_peft_model_state_dict(model)
    inner = model.base_model.model
    gathered: dict[str, torch.Tensor] = {}
    assert inner.state_dict(gathered, "prefix.") is gathered
    assert {f"prefix.{name}" for name in inner.state_dict()} == gathered.keys()
    model.close()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    wanted = peft.get_peft_model_state_dict(adapted())
    assert adapter.keys() == wanted.keys()
    assert all(torch.equal(adapter[name], wanted[name]) for name in wanted)


def test_a_state_dict_with_trained_copies_has_the_originals_and_is_loaded() -> None:
    base = plain_model(tiny_config("llama"), torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
    plain = peft.get_peft_model(base, config)
    expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model, _ = ps.stream(plain, **SMALL)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    model.load_state_dict({name: tensor + 1 for name, tensor in expected.items()})
    found = model.state_dict()
    model.close()
    assert all(torch.equal(found[name], expected[name] + 1) for name in expected)
    assert all(torch.equal(t, found[name]) for name, t in plain.state_dict().items())


def test_an_adapter_with_trained_copies_cannot_be_switched_off() -> None:
    base = plain_model(tiny_config("llama"), torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model, _ = ps.stream(peft.get_peft_model(base, config), **SMALL)
    with model.disable_adapter(), pytest.raises(EngineError, match="modules_to_save"):
        model(**padded_batch(0))
    with pytest.raises(UnsupportedModelError, match="is trained as well"):
        model.add_adapter("ref", model.peft_config["default"])
    model.close()
