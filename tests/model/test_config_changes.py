"""Changed fields of a model's config: what is trained can be loaded again, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.errors import SurveyError
from penstock.model.config import load_config
from penstock.model.config_check import check_fields


def save(folder: Path, **fields: Any) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=5, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, **fields,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layers", [2, 9])
def test_layer_types_follow_the_number_of_layers(layers: int, tmp_path: Path) -> None:
    fields = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

    config = load_config(save(tmp_path, **fields), changes={"num_hidden_layers": layers})
    config.save_pretrained(tmp_path / "saved")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "saved")

    expected = ["full_attention"] + ["sliding_attention"] * (layers - 1)
    assert config.layer_types == again.layer_types == expected


def test_layer_types_without_a_rule_are_refused(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    model = save(tmp_path, use_sliding_window=True, sliding_window=16, layer_types=types)

    with pytest.raises(SurveyError, match="num_hidden_layers is 2, but layer_types has 5 entries"):
        load_config(model, changes={"num_hidden_layers": 2})
    changes = {"num_hidden_layers": 2, "layer_types": types[:2]}
    assert load_config(model, changes=changes).layer_types == types[:2]


def test_a_change_that_transformers_would_not_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SurveyError, match="--model-config"):
        load_config(save(tmp_path), changes={"layer_types": ["full_attention"]})


def test_a_dense_model_of_a_class_with_experts_has_none() -> None:
    check_fields({"num_local_experts": 0, "hidden_size": 64}, "config.json")
    with pytest.raises(SurveyError, match="hidden_size must be a whole number from 1 to"):
        check_fields({"num_local_experts": 0, "hidden_size": 0}, "config.json")


@pytest.mark.parametrize("name", ["rms_norm_eps", "layer_norm_epsilon"])
def test_an_epsilon_below_zero_is_refused(name: str) -> None:
    check_fields({name: 0.0}, "config.json")
    for value in (-1e-6, float("nan")):
        with pytest.raises(SurveyError, match=f"config.json: {name} must be 0 or above"):
            check_fields({name: value}, "config.json")
