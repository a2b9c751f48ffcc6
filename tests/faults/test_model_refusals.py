"""Models that would train wrongly: refused before memory is allocated, or for packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from penstock.engine.prepare import prepare
from penstock.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = {"hbm": "1GiB", "dram": "1GiB"}


def prepare_small(model: Any) -> Any:
    return prepare(
        model, budget=BUDGET, context=16, batch=1, device="cpu", compiled=False, steps=2, lr=1e-3
    )


def test_a_model_that_is_refused_stays_whole() -> None:
    config = transformers.PhimoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.PhimoeForCausalLM(config)

    with pytest.raises(UnsupportedModelError, match="draws random numbers in training"):
        prepare_small(model)

    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_convolution_trains_on_padded_rows_and_refuses_packed_ones() -> None:
    config = transformers.Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"],
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ids = torch.randint(3, 64, (1, 16))
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    padded = torch.where(torch.arange(16) < 9, ids, -100)
    with prepare_small(transformers.Lfm2ForCausalLM(config)) as engine:
        with pytest.raises(UnsupportedModelError, match=r"packed documents: .*Conv"):
            engine.step({"input_ids": ids, "position_ids": positions})
        assert engine.steps == 0

        engine.step({"input_ids": ids, "labels": padded, "position_ids": positions})
        engine.step({"input_ids": ids})
        assert engine.steps == 2
