"""Models that Penstock would train wrongly are refused by what they do, not by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from penstock.errors import UnsupportedModelError
from penstock.model.inventory import Inventory
from penstock.model.meta_model import check_trainable
from penstock.model.self_check import check_model
from penstock.model.survey import survey_config
from penstock.model.twin import HIDDEN, VOCABULARY, build_twin, twin_config

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def inspect(kind: str, freeze: Sequence[str] = (), **fields: Any) -> Inventory:
    config = transformers.AutoConfig.for_model(kind, **fields)
    return survey_config(config, name=kind, freeze=freeze, check=check_model)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", SMALL),
        ("gemma3_text", {**SMALL, "num_hidden_layers": 6}),
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2}),
        *(
            pytest.param(kind, fields, marks=pytest.mark.long)
            for kind, fields in (
                ("qwen3", {**SMALL, "head_dim": 32}),
                ("gemma2", SMALL),
                ("opt", {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4}),
                ("ctrl", {"n_embd": 64, "n_head": 4, "n_layer": 2, "dff": 96}),
                ("phi", {**SMALL, "partial_rotary_factor": 0.4, "num_key_value_heads": 4}),
            )
        ),
        (
            "llama",
            {
                **SMALL,
                "head_dim": 4,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 100.0,
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                    "short_factor": [1.0, 1.1],
                    "long_factor": [2.0, 2.3],
                },
            },
        ),  # heads that are smaller than the twin's
    ],
)
def test_models_that_leave_attention_to_transformers_pass(kind: str, fields: Any) -> None:
    inventory = inspect(kind, **fields)

    assert inventory.not_trainable == ""
    assert inventory.mixes_documents == ""
    check_trainable(inventory)


# tests/conformance_models trains all of them.
@pytest.mark.parametrize(
    "kind",
    [
        "bloom",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("codegen", "xglm", "falcon", "gptj", "gpt_neo", "mpt")
        ),
    ],
)
def test_models_with_their_own_attention_keep_it(kind: str) -> None:
    inventory = inspect(kind)

    assert inventory.own_attention
    assert not inventory.plain_attention
    assert inventory.not_trainable == ""
    assert inventory.mixes_documents == ""


def test_models_that_leave_attention_to_transformers_do_not_keep_their_own() -> None:
    assert not inspect("llama", **SMALL).own_attention


def test_models_whose_layers_do_not_run_by_themselves_are_refused() -> None:
    inventory = inspect("bamba")

    assert "BambaMixer" in inventory.not_trainable
    with pytest.raises(UnsupportedModelError, match="bamba"):
        check_trainable(inventory)


@pytest.mark.parametrize(
    ("kind", "fields", "mixer"),
    [
        ("qwen3_5_text", {}, "Qwen3_5GatedDeltaNet"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "Conv"),
        pytest.param("recurrent_gemma", {}, "RecurrentGemmaRglru", marks=pytest.mark.long),
        pytest.param("mamba", {"num_hidden_layers": 2}, "MambaMixer", marks=pytest.mark.long),
        pytest.param("blenderbot", {}, "positions", marks=pytest.mark.long),
        ("marian", {}, "positions"),  # whose class freezes its table of positions
    ],
)
def test_what_carries_state_across_packed_documents_is_named(
    kind: str, fields: Any, mixer: str
) -> None:
    # A decoder without an encoder does not use its cross-attention, which cannot be trained.
    inventory = inspect(kind, freeze=("*.encoder_attn*",), **fields)

    assert inventory.not_trainable == ""
    assert mixer in inventory.mixes_documents


def test_attention_sinks_are_computed_with_the_kernels() -> None:
    inventory = inspect("granite_swa", **SMALL, head_dim=16)

    assert inventory.not_trainable == inventory.mixes_documents == ""
    assert inventory.plain_attention


def test_layers_that_need_gradients_of_more_than_hidden_states_are_refused() -> None:
    config = transformers.AutoConfig.for_model("gemma4_text")

    inventory = survey_config(config, name="gemma4", check=check_model)

    assert "per_layer_input" in inventory.not_trainable


def test_layers_that_share_keys_and_values_are_refused() -> None:
    config = transformers.AutoConfig.for_model(
        "gemma4_text", hidden_size_per_layer_input=0, num_kv_shared_layers=2, num_hidden_layers=12
    )

    inventory = survey_config(config, name="gemma4", check=check_model)

    assert "shared keys and values" in inventory.not_trainable


def test_layers_that_are_skipped_at_random_are_refused() -> None:
    assert "layerdrop" in inspect("opt", layerdrop=0.1).not_trainable


def test_models_that_see_later_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaDecoderLayer.forward

    def look_ahead(self: Any, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return forward(self, hidden + hidden.flip(1), **arguments)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", look_ahead)

    inventory = inspect("llama", **{**SMALL, "rms_norm_eps": 3e-6})

    assert "is not causal" in inventory.not_trainable


@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt2", "lfm2", "llama", "mpt", "opt"])
def test_every_size_of_a_published_config_is_tiny_in_its_twin(family: str) -> None:
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]()
    with torch.device("meta"):
        twin = transformers.AutoModelForCausalLM.from_config(twin_config(config, 2))

    assert sum(parameter.numel() for parameter in twin.parameters()) < 200_000


def test_a_twin_has_tiny_sizes_and_every_kind_of_layer() -> None:
    config = transformers.AutoConfig.for_model("gemma3_text", num_hidden_layers=26)

    twin = twin_config(config, 6)
    model = build_twin(transformers.Gemma3ForCausalLM, twin, None)

    assert len(model.model.layers) == 6  # type: ignore[union-attr, arg-type]
    assert set(twin.layer_types) == {"sliding_attention", "full_attention"}
    assert twin.vocab_size == VOCABULARY
    assert HIDDEN <= twin.hidden_size < 2 * HIDDEN
    assert config.vocab_size > VOCABULARY


def test_models_that_differ_in_size_share_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.model import self_check

    inspect("llama", **SMALL)
    monkeypatch.setattr(self_check, "build_twin", None)  # a second check would call it

    assert inspect("llama", **{**SMALL, "hidden_size": 256}).not_trainable == ""
