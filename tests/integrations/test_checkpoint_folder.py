"""Which files of a trainer's checkpoint are the model's own."""

from __future__ import annotations

import pytest

from penstock.checkpoint.training_state import STATE
from penstock.integrations.checkpoint_folder import is_model_file


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        (STATE, True),
        ("config.json", False),
        ("trainer_state.json", False),
        ("tokenizer.model", False),
    ],
)
def test_a_file_has_weights_or_states_by_its_name(name: str, expected: bool) -> None:
    assert is_model_file(name) is expected
