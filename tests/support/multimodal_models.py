"""Tiny multimodal models, and batches of text and images for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 128
IMAGE = 120
"""The token that stands for a part of an image."""

Batch = dict[str, torch.Tensor]


def _text(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip


def _qwen_vision(**changes: Any) -> dict[str, Any]:
    return {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        **changes,
    }  # fmt: skip


def qwen2_5_vl(**changes: Any) -> Any:
    """Return a config with the structure of Qwen2.5-VL-3B-Instruct's."""
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = _text(rope_parameters=rotary, tie_word_embeddings=True) | changes
    text.pop("head_dim")
    vision = _qwen_vision(
        out_hidden_size=64, window_size=16, fullatt_block_indexes=[1], tokens_per_second=2
    )
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=121,
        vision_start_token_id=122, vision_end_token_id=123, tie_word_embeddings=True,
    )  # fmt: skip


def qwen2_vl(**changes: Any) -> Any:
    """Return a config with the structure of Qwen2-VL-7B-Instruct's."""
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = _text(rope_parameters=rotary) | changes
    text.pop("head_dim")
    vision = _qwen_vision(embed_dim=32, hidden_size=64, mlp_ratio=2)
    return transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=121,
        vision_start_token_id=122, vision_end_token_id=123, tie_word_embeddings=False,
    )  # fmt: skip


def gemma3(**changes: Any) -> Any:
    """Return a config with the structure of gemma-3-4b-it's."""
    text = _text(
        sliding_window=8, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ) | changes  # fmt: skip
    vision = {
        "hidden_size": 32, "image_size": 16, "intermediate_size": 48, "num_attention_heads": 2,
        "num_hidden_layers": 2, "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=122,
        eoi_token_index=123, image_token_index=IMAGE,
    )  # fmt: skip


def llava(**changes: Any) -> Any:
    """Return a config with the structure of llava-1.5-7b-hf's."""
    text = transformers.LlamaConfig(**_text(**changes))
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, image_size=16, intermediate_size=48, num_attention_heads=2,
        num_hidden_layers=3, patch_size=8, projection_dim=32,
    )  # fmt: skip
    return transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, image_seq_length=4
    )


CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen2_5_vl": qwen2_5_vl, "qwen2_vl": qwen2_vl, "gemma3": gemma3, "llava": llava,
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Build a model with random weights, whose towers are frozen."""
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForImageTextToText.from_config(
        CONFIGS[name](**changes), dtype=dtype
    )
    with torch.no_grad():
        for parameter in model.parameters():  # so that images matter
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    freeze_towers(model)
    return model.train()


def freeze_towers(model: Any) -> None:
    """Freeze everything but the language model."""
    inside = {id(p) for part in (model.get_decoder(), model.lm_head) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(False)


def batch(
    name: str, seed: int, *, images: bool = True, side: str = "right", device: str = "cpu"
) -> Batch:
    """Return two rows of different lengths, each with an image or two, and labels."""
    draw = torch.Generator().manual_seed(seed)
    lengths, counts = (28, 21), (2, 1)
    ids = torch.zeros(2, max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tokens = torch.randint(3, 110, (length,), generator=draw)
        if images:
            for number in range(count):
                at = 3 + 9 * number
                tokens[at] = 122
                tokens[at + 1 : at + 5] = IMAGE
                tokens[at + 5] = 123
        start = 0 if side == "right" else max(lengths) - length
        ids[row, start : start + length] = tokens
        mask[row, start : start + length] = 1
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    kinds = (ids == IMAGE).long()
    if name.startswith("qwen"):
        made["mm_token_type_ids"] = kinds
    elif name == "gemma3":
        made["token_type_ids"] = kinds
    if images:
        made |= _pixels(name, sum(counts), draw)
    return {key: value.to(device) for key, value in made.items()}


def _pixels(name: str, count: int, draw: torch.Generator) -> Batch:
    """Return so many images, each of which becomes four tokens."""
    if name.startswith("qwen"):
        patches, width = 16 * count, 3 * 2 * 4 * 4
        return {
            "pixel_values": torch.randn(patches, width, generator=draw),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * count),
        }
    return {"pixel_values": torch.randn(count, 3, 16, 16, generator=draw)}
