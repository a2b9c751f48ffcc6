"""Models that are built from a config without memory for their parameters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import initialization, modeling_utils

from penstock.model.meta_model import build_model
from penstock.model.survey import survey_config
from tests.support.engines import plain_model, tiny_config


def test_a_model_does_not_recommend_a_mask_for_padding() -> None:
    config = tiny_config("gpt2")
    config.pad_token_id = 0
    model: Any = build_model(config, torch.float32, torch.device("cpu"))
    ids = torch.zeros(1, 4, dtype=torch.int64)

    with mock.patch.object(modeling_utils.logger, "warning_once") as warned:
        model.transformer.warn_if_padding_and_no_attention_mask(ids, None)

    warned.assert_not_called()


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_transformers_draws_no_initial_values_for_parameters_without_memory(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, torch would run a millisecond of Python for each of them."""

    def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        assert not isinstance(tensor, torch.nn.Parameter)

    for name in initialization.TORCH_INIT_FUNCTIONS:
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, fill)

    build_model(tiny_config(family), torch.bfloat16, torch.device("cpu"))
    survey_config(tiny_config(family), name="tiny")


def test_buffers_have_the_values_of_transformers() -> None:
    """Which transformers fills together with the parameters."""
    config = tiny_config("llama")
    model: Any = build_model(config, torch.float32, torch.device("cpu"))
    expected = dict(plain_model(config, torch.float32).named_buffers())
    found = dict(model.named_buffers())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
