"""Surveys of causal language models from their configs alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from penstock.errors import SurveyError
from penstock.model.survey import survey, survey_config
from tests.support import engines

CONFIGS = Path(__file__).parents[1] / "configs"

PUBLISHED = {
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-7b": 7_298_617_344,
    "phi-3-mini": 3_821_079_552,
    "pythia-1b": 1_011_781_632,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}
SAMPLE = ("gemma-3-1b", "gpt2", "mixtral-8x7b", "phi-3-mini")
TIED = {"gemma-2-2b", "gemma-3-1b", "gpt2", "qwen2.5-3b"}
NOT_PLAIN = {"gpt2"}
"""Models whose attention Penstock's kernels do not support: it uses dropout."""


@pytest.mark.parametrize(
    "name",
    [
        *SAMPLE,
        *(pytest.param(name, marks=pytest.mark.long) for name in PUBLISHED if name not in SAMPLE),
    ],
)
def test_parameter_counts_match_the_published_ones(name: str) -> None:
    inventory = survey(CONFIGS / name)
    names = [t.name for block in inventory.blocks for t in block.tensors]

    assert inventory.parameters() == PUBLISHED[name]
    assert len(names) == len(set(names))
    assert inventory.tied == (name in TIED)
    assert inventory.plain_attention == (name not in NOT_PLAIN)


@pytest.mark.parametrize(
    ("name", "active", "width"),
    [("mixtral-8x7b", 12.7e9, 2 * 14336), ("qwen3-30b-a3b", 3.0e9, 8 * 768)],
)
def test_only_active_experts_count_as_compute(name: str, active: float, width: int) -> None:
    inventory = survey(CONFIGS / name)
    active_elements = sum(block.matmul_elements for block in inventory.layers)

    assert active_elements == pytest.approx(active, rel=0.1)
    assert inventory.layers[0].mlp_width == width
    assert inventory.layers[0].active_experts == (2 if name.startswith("mixtral") else 8)
    assert not inventory.not_trainable


def test_a_dense_layer_of_a_mixture_has_no_active_experts() -> None:
    config = engines.tiny_config("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=1)

    assert [block.active_experts > 0 for block in engines.inventory(config).layers] == [False, True]


def test_sliding_windows_are_found_for_each_layer() -> None:
    gemma = survey(CONFIGS / "gemma-2-2b")
    qwen = survey(CONFIGS / "qwen2.5-3b")

    assert {block.window for block in gemma.layers} == {4096, None}
    assert {block.window for block in qwen.layers} == {None}  # use_sliding_window is false


def test_patterns_freeze_tensors() -> None:
    inventory = survey(CONFIGS / "qwen2.5-3b", freeze=("model.embed_tokens.*", "*layers.0.*"))

    assert inventory.blocks[0].parameters(trainable=True) == 0
    assert inventory.blocks[1].parameters(trainable=True) == 0
    assert inventory.blocks[2].parameters(trainable=True) > 0


def test_the_list_of_layers_can_be_named_and_a_wrong_name_lists_alternatives() -> None:
    assert len(survey(CONFIGS / "gpt2", blocks="transformer.h").layers) == 12
    with pytest.raises(
        SurveyError, match=r"at model\.nowhere; it has lists at transformer\.h.*--blocks"
    ):
        survey(CONFIGS / "gpt2", blocks="model.nowhere")


def test_a_hub_id_without_network_access_suggests_a_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(SurveyError, match=r"nobody/nothing.*directory that contains its config"):
        survey("nobody/nothing")


def test_missing_directories_and_unknown_model_types_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SurveyError, match=r"has no config\.json"):
        survey(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(SurveyError, match="no-such-model"):
        survey(tmp_path)
    with pytest.raises(SurveyError, match="there is no directory"):
        survey("/no/such/place")


def test_a_config_with_which_transformers_divides_by_zero_is_refused() -> None:
    config = transformers.GPTNeoXConfig(hidden_size=0, num_attention_heads=4, vocab_size=99)

    with pytest.raises(SurveyError, match=r"cannot build .* of type 'gpt_neox': ZeroDivisionError"):
        survey_config(config, name="zero")


def test_a_config_whose_lists_are_too_short_is_refused_with_their_names() -> None:
    config = transformers.SmolLM3Config(num_hidden_layers=3)
    config.no_rope_layers = [1, 1]
    with pytest.raises(
        SurveyError,
        match=r"cannot build .* 'smollm3': no_rope_layers has 2 entries for 3 layers; a list needs",
    ):
        survey_config(config, name="short")


def test_only_matrices_are_multiplied_with_every_token() -> None:
    """Norms and biases are no matrices."""
    for block in engines.inventory(engines.tiny_config("qwen2")).layers:
        matrices = [t for t in block.tensors if len(t.shape) > 1]
        assert len(matrices) < len(block.tensors)
        assert block.matmul_elements == sum(t.elements for t in matrices)
