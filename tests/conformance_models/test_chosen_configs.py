"""Configs with features that random configs seldom combine are computed right, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance_models.check import examine_config
from tests.conformance_models.expected import shorten
from tests.conformance_models.tiny import tiny_variant
from tests.support.samples import sample

FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
LAST = [FULL, FULL, WINDOW]
"""A layer type that the first two layers do not have: a twin of two layers would not have it."""

YARN = {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0, "beta_fast": 16.0,
        "original_max_position_embeddings": 8, "beta_slow": 2.0, "truncate": False}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "factor": 2.0,
        "original_max_position_embeddings": 8, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.3, 2.6, 2.9]}  # fmt: skip

RIGHT = "right: 0.0000"
REFUSES_PACKING = "right: 0.0000, packed documents refused"

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # The mask of the last layer alone has chunks, and its modules know nothing of that.
    "llama4_text: chunks in the last layer": (
        "llama4_text", {"layer_types": [FULL, FULL, CHUNK], "no_rope_layers": [1, 1, 1]}, RIGHT,
    ),
    # Queries are scaled by their position in the row, of tokens that no twin's row reaches.
    "llama4_text: scaled queries": (
        "llama4_text", {"layer_types": [FULL] * 3, "no_rope_layers": [0, 0, 1], "floor_scale": 13,
                        "attn_scale": 0.5}, REFUSES_PACKING,
    ),
    "gemma3_text: rotary types by layer": (
        "gemma3_text", {"layer_types": [WINDOW, FULL, WINDOW], "sliding_window": 5,
                        "rope_parameters": {FULL: LONG, WINDOW: DYNAMIC},
                        "max_position_embeddings": 16}, RIGHT,
    ),
    # Their routers note nothing for the auxiliary loss, or the class does not add it.
    "llama4_text: router loss": (
        "llama4_text", {"output_router_logits": True, "router_aux_loss_coef": 0.1},
        "refused: output_router_logits is on, and Penstock does not compute the loss that "
        "Llama4ForCausalLM adds for it, if any",
    ),
    "mixtral: router loss": (
        "mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}, RIGHT,
    ),
    "jamba: router loss": (
        "jamba", {"output_router_logits": True, "router_aux_loss_coef": 0.1}, REFUSES_PACKING,
    ),
    # Its class scales the weight in its code for new weights.
    "mamba2: a weight that loading changes": (
        "mamba2", {"rescale_prenorm_residual": True},
        "refused: Mamba2ForCausalLM changes backbone.layers.0.mixer.out_proj.weight whenever "
        "transformers loads it, so a checkpoint would not load as the model that was trained",
    ),
    # One key head for one query is one for each query, which latent attention needs.
    "deepseek_v3: one head": (
        "deepseek_v3", {"num_attention_heads": 1, "num_key_value_heads": 1}, RIGHT,
    ),
    "llama: odd sizes": (
        "llama", {"hidden_size": 35, "intermediate_size": 53, "vocab_size": 101, "head_dim": 6,
                  "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
                  "mlp_bias": True}, RIGHT,
    ),
    "llama: a token that is padding": (
        "llama", {"pad_token_id": 7, "tie_word_embeddings": True}, RIGHT,
    ),
    "gemma3_text: caps": (
        "gemma3_text", {"layer_types": LAST, "sliding_window": 3, "query_pre_attn_scalar": 5,
                        "final_logit_softcapping": 3.0, "attn_logit_softcapping": 4.0,
                        "rope_parameters": {FULL: YARN, WINDOW: LLAMA3}}, RIGHT,
    ),
    "gemma2: caps": (
        "gemma2", {"layer_types": LAST, "sliding_window": 2, "attn_logit_softcapping": 2.0,
                   "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 3}, RIGHT,
    ),
    "granite: multipliers": (
        "granite", {"embedding_multiplier": 7.0, "residual_multiplier": 0.3, "mlp_bias": True,
                    "attention_multiplier": 0.9, "logits_scaling": 5.0, "attention_bias": True,
                    "rope_parameters": YARN}, RIGHT,
    ),
    "cohere2: scale": (
        "cohere2", {"layer_types": LAST, "sliding_window": 3, "logit_scale": 0.3}, RIGHT,
    ),
    "exaone4: window": ("exaone4", {"layer_types": LAST, "sliding_window": 3}, RIGHT),
    "smollm3: window without positions": (
        "smollm3", {"no_rope_layers": [1, 1, 0], "use_sliding_window": True, "sliding_window": 3,
                    "layer_types": LAST}, RIGHT,
    ),
    "olmo3: yarn": (
        "olmo3", {"layer_types": LAST, "sliding_window": 3, "rope_parameters": YARN}, RIGHT,
    ),
    "phi3: longrope, partly rotary": (
        "phi3", {"sliding_window": 5, "rope_parameters": LONG | {
            "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1], "long_factor": [2.0, 2.3],
        }}, RIGHT,
    ),
    "qwen3: window and biases": (
        "qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 3,
                  "layer_types": LAST, "head_dim": 10}, RIGHT,
    ),
    "ministral3: scaled queries": (
        "ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}, RIGHT,
    ),
    "minimax_m3_vl_text: few blocks": (
        "minimax_m3_vl_text", {"index_block_size": 7, "index_topk_blocks": 2}, RIGHT,
    ),
    "doge: few keys": ("doge", {"keep_window_size": 14}, RIGHT),
}  # fmt: skip
"""By name: family, fields, and the outcome."""

SAMPLE = (
    "llama4_text: chunks in the last layer",
    "llama4_text: scaled queries",
    "gemma3_text: rotary types by layer",
    "llama4_text: router loss",
    "mamba2: a weight that loading changes",
    "deepseek_v3: one head",
)
"""Cases that were wrong once, and are not only part of `make test-long`."""


@pytest.mark.parametrize("case", sample(CASES, SAMPLE))
def test_a_chosen_config_is_right_or_refused(case: str, tmp_path: Path) -> None:
    family, fields, wanted = CASES[case]
    outcome = examine_config(tiny_variant(family, fields), tmp_path, "fp32")
    assert str(shorten(outcome)) == wanted
