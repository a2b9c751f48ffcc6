"""Write checkpoints with FP8 weights and block scales, as published ones have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values and the scale of each block; the last blocks may be partial."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            part = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = weight[part].float().abs().max() / 448
            values[part] = (weight[part].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def save_fp8(model: Any, folder: Path, block: tuple[int, int] = (128, 128)) -> Path:
    """Save a transformers model with FP8 matrices in its layers, and return the folder."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "proj" in name and tensor.dim() == 2:
            values, scales = quantize(tensor, block)
            tensors |= {name: values, f"{name}_scale_inv": scales}
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = tensor.to(torch.bfloat16)
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": list(block),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder
