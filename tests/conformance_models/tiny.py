"""Tiny configs of every causal language model of transformers, made by rule.

Every field that stands for a size is set to a small value by its name. A list with one entry per
layer keeps each of its different values, so that every kind of layer occurs. `OVERRIDES` has what
the rule cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCABULARY = 96
LARGEST_TOKEN = 80
"""Tokens above this one are special tokens, such as images, and do not occur in batches."""


def _class_names() -> dict[str, str]:
    causal, multimodal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    # Files of a type that is both have the tensors of the multimodal class.
    both = {kind for kind in causal if kind in multimodal}
    files = {kind for kind in both if "text_config" in CONFIG_MAPPING[kind].sub_configs}
    return {**multimodal, **causal, **{kind: multimodal[kind] for kind in files}}


FAMILIES: Mapping[str, str] = _class_names()
"""Class name by model type, of causal language models and of models that contain one."""

LAYERS = 3
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
           "encoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks",
           "num_layers_per_stack")  # fmt: skip

_NEEDED = ("head_dim", "num_key_value_heads")
"""Sizes that are set even if the default is none."""

_SIZES: dict[str, Any] = {}
for _names, _value in (
    (("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim",
      "embedding_dim", "lru_width", "attention_hidden_size", "input_embedding_size",
      "output_embedding_size", "cross_attention_hidden_size", "backbone_hidden_size",
      "hidden_size_per_layer_input", "pronunciation_embed_dim", "shape_embed_dim",
      "ple_embed_dim", "output_hidden_size", "out_hidden_size", "audio_hidden_size",
      "hidden_size_global", "router_hidden_size"), 32),
    (("intermediate_size", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dim_ff",
      "dff", "ffn_hidden_size", "feed_forward_size", "moe_intermediate_size", "d_inner",
      "shared_expert_intermediate_size", "shared_intermediate_size", "dense_intermediate_size",
      "intermediate_size_mlp", "expert_ffn_hidden_size", "prefix_dense_intermediate_size",
      "moe_shared_expert_intermediate_size", "prompt_mid_dim"), 48),
    (("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
      "encoder_attention_heads", "attention_heads", "num_encoder_attention_heads",
      "num_decoder_attention_heads", "swa_num_attention_heads", "linear_num_heads",
      "linear_num_value_heads", "index_n_heads", "n_mamba_heads"), 4),
    (("num_key_value_heads", "swa_num_key_value_heads", "num_query_groups",
      "linear_num_key_heads", "num_kv_heads"), 2),
    (("head_dim", "dim_head", "d_head", "kv_channels", "attention_head_dim",
      "attention_head_size", "swa_head_dim", "linear_head_dim", "linear_key_head_dim",
      "linear_value_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
      "index_head_dim", "rotary_dim", "global_head_dim", "d_rel"), 8),
    (("qk_head_dim",), 16),
    (("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank",
      "hc_lowrank", "gated_norm_rank"), 8),
    (("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
      "zero_expert_num"), 4),
    (("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
      "n_groups", "o_groups", "hc_mult", "hc_count"), 2),
    (("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts",
      "mamba_n_groups", "mamba_ngroups", "first_k_dense_replace", "num_dense_layers",
      "moe_layer_start_index", "num_kv_shared_layers"), 1),
    (("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
      "max_target_positions", "max_source_positions", "model_max_length",
      "original_max_position_embeddings", "num_centroids"), 64),
    (("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size",
      "audio_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    (("sliding_window", "window_size", "attention_chunk_size", "attention_window_size",
      "sliding_window_size", "local_attention", "keep_window_size"), 6),
    (("state_size", "mamba_d_state", "ssm_state_size", "time_step_rank", "mamba_dt_rank",
      "mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_d_conv"), 8),
    (("mamba_n_heads", "mamba_num_heads", "mamba_num_heads"), 8),
    (("mamba_chunk_size", "chunk_size", "index_topk", "index_block_size",
      "local_attn_chunk_length", "lsh_attn_chunk_length", "rel_extent"), 8),
    (("image_size",), 8),
    (("patch_size",), 4),
    (("query_pre_attn_scalar",), 8),
    (("num_nextn_predict_layers", "num_mtp_layers"), 0),
):  # fmt: skip
    for _name in _names:
        _SIZES[_name] = _value

_CONVOLUTION = ["conv", "full_attention", "conv"]
_HYBRID = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
            "indexer_budget": 8, "indexer_compress_ratio": 2}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "cosmos3_edge_text": {"rope_parameters": _MROPE},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
                        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "glm5_next_text": {"index_kpool": 8},
    "lfm2": {"layer_types": _CONVOLUTION},
    "lfm2_moe": {"layer_types": _CONVOLUTION},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "qwen4_exp_text": _INDEXER | {"ngram_vocab_size_base": 64},
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": _HYBRID, "attention_hidden_size": 64,
              "attention_head_dim": 16},
    "zamba2": {"num_hidden_layers": 5, "layers_block_type": _HYBRID, "attention_hidden_size": 64,
               "attention_head_dim": 16, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Fields by model type, also of configs inside configs."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon: ALiBi": ("falcon", {"alibi": True}),
    "falcon: new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma4_text: one head size": ("gemma4_text", {"per_layer_config": {}}),
    "gemma4_text: shared keys": (
        "gemma4_text",
        {"per_layer_config": {}, "num_kv_shared_layers": 1},
    ),
    "gpt_neox: tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "granitemoehybrid: dense": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"] * 3},
    ),
    "lfm2: attention": ("lfm2", {"layer_types": ["full_attention"] * 3}),
    "llama: tied": ("llama", {"tie_word_embeddings": True}),
    "mistral3: tied": ("mistral3", {"tie_word_embeddings": True}),
    "opt: projection": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "qwen2: window": ("qwen2", {"use_sliding_window": True, "layer_types":
                                ["full_attention", "sliding_attention", "sliding_attention"]}),
}  # fmt: skip
"""Configs of a family that run other code than its default config: model type and fields."""


def tiny_config(case: str) -> Any:
    """Return a config of a model with a few ten thousand parameters, for a family or variant."""
    return tiny_variant(*VARIANTS.get(case, (case, {})))


def tiny_variant(family: str, changes: Mapping[str, Any]) -> Any:
    """Return a tiny config of a family with some fields of another value."""
    return _tiny(CONFIG_MAPPING[family], changes)


def _tiny(kind: Any, changes: Mapping[str, Any]) -> Any:
    overrides = OVERRIDES.get(kind.model_type or kind.__name__, {}) | dict(changes)
    default = _default(kind, overrides)
    fields = default.to_dict()
    layers = next((fields[n] for n in _LAYERS if isinstance(fields.get(n), int)), None)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        inner = getattr(default, name) if isinstance(value, dict) else None
        if name in _LAYERS:
            small[name] = LAYERS
        elif name in _SIZES and (value or name in _NEEDED):
            count = len(value) if isinstance(value, list | tuple) else 0
            count = LAYERS if count == layers else count
            small[name] = [_SIZES[name]] * count if count else _SIZES[name]
        elif "drop" in name and isinstance(value, float):
            small[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            small[name] = _special_token(name)
        elif isinstance(value, list) and layers and len(value) == layers:
            different = list(dict.fromkeys(value))
            small[name] = [different[i % len(different)] for i in range(LAYERS)]
        elif isinstance(inner, PreTrainedConfig):
            small[name] = _tiny(type(inner), {})
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        small["num_key_value_heads"] = _SIZES["num_attention_heads"]  # latent attention
    if isinstance(text := small.get("text_config"), PreTrainedConfig):
        small["tie_word_embeddings"] = getattr(text, "tie_word_embeddings", False)
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True}
    return kind(**{n: v for n, v in small.items() if n in fields} | overrides)


def _special_token(name: str) -> int:
    known = {"pad": 0, "bos": 1, "eos": 2}
    return known.get(name.partition("_")[0], LARGEST_TOKEN + 1 + sum(map(ord, name)) % 14)


def _default(kind: Any, overrides: Mapping[str, Any]) -> Any:
    try:
        return kind()
    except StrictDataclassClassValidationError:  # some configs have no valid default
        return kind(**overrides)
