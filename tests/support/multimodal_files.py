"""Write tiny multimodal checkpoints with the config and tensor names of published ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

# The fields of config.json of gemma-3-4b-it, Mistral-Small-3.1-24B and Qwen3.5, with small sizes.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 60, "eoi_token_index": 61, "eos_token_id": [1, 2],
        "image_token_index": 62, "initializer_range": 0.02, "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 32, "intermediate_size": 64, "model_type": "gemma3_text",
            "num_hidden_layers": 3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 16, "vocab_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 16, "image_size": 28, "intermediate_size": 32,
            "model_type": "siglip_vision_model", "num_attention_heads": 2, "num_hidden_layers": 1,
            "patch_size": 14, "vision_use_head": False,
        },
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10, "model_type": "mistral3", "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "silu", "hidden_size": 32,
            "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 128,
            "model_type": "mistral", "num_attention_heads": 4, "num_hidden_layers": 3,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
            "sliding_window": None, "use_cache": True, "vocab_size": 64,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 8, "hidden_act": "gelu", "hidden_size": 16,
            "image_size": 28, "initializer_range": 0.02, "intermediate_size": 32,
            "model_type": "pixtral", "num_attention_heads": 2, "num_channels": 3,
            "num_hidden_layers": 1, "patch_size": 14, "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
        "vision_end_token_id": 63, "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {
            "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
            "full_attention_interval": 4, "head_dim": 8, "hidden_act": "silu", "hidden_size": 32,
            "intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_value_head_dim": 8, "mtp_num_hidden_layers": 1,
            "max_position_embeddings": 128, "model_type": "qwen3_5_text", "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [1, 0, 0], "rope_type": "default",
                "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            },
            "vocab_size": 64,
        },
        "transformers_version": "4.57.0.dev0",
        "vision_config": {
            "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 16, "in_channels": 3,
            "intermediate_size": 32, "model_type": "qwen3_5", "num_heads": 2,
            "num_position_embeddings": 16, "out_hidden_size": 32, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [],
        },
    },
}  # fmt: skip

# Layers for multi-token prediction, which the published files have and transformers does not.
MORE_TENSORS: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen3_5": {"mtp.fc.weight": (32, 64), "mtp.layers.0.mlp.up_proj.weight": (64, 32)},
}


def save_multimodal(
    folder: Path, family: str, *, published: bool = True, vocabulary: int = 64
) -> Path:
    """Save a model with random weights, and return its folder.

    Args:
        folder: Directory to create.
        family: A key of `CONFIGS`.
        published: Whether to use the names of the published files, or those that the classes of
            transformers have today.
        vocabulary: Number of tokens.
    """
    folder.mkdir()
    fields = copy.deepcopy(CONFIGS[family])
    fields["text_config"]["vocab_size"] = vocabulary
    (folder / "config.json").write_text(json.dumps(fields))
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and family == "gemma3":
            continue  # tied
        # Other values for each tensor, norms and head included.
        drawn = tensor + 0.02 * torch.randn(tensor.shape, dtype=torch.float32)
        tensors[_published(name, family) if published else name] = drawn.to(torch.bfloat16)
    if published:
        for name, shape in MORE_TENSORS.get(family, {}).items():
            tensors[name] = torch.randn(shape).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _published(name: str, family: str) -> str:
    if family == "qwen3_5":
        return name
    tower = "vision_tower.vision_model." if family == "gemma3" else "vision_tower."
    for today, before in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", tower),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(today):
            return before + name.removeprefix(today)
    raise AssertionError(name)


def check_kept(source: Path, out: Path) -> None:
    """Check that the files have the same names, and only the text stack was trained."""
    old, new = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert set(old) == set(new)
    parts = ("vision_tower.", "multi_modal_projector.", "model.visual.", "mtp.")
    rest = [name for name in old if any(part in name for part in parts)]
    assert rest
    for name in rest:
        assert old[name].dtype == new[name].dtype
        assert torch.equal(old[name], new[name]), name
    text = [name for name in old if name not in rest]
    assert [name for name in text if torch.equal(old[name], new[name])] == []
