"""Write a tiny gpt-oss with MXFP4 experts, as the published files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.moe_files import save_moe


def save_mxfp4(folder: Path, *, low: int = 110, high: int = 130, **fields: Any) -> None:
    """Save a model whose experts are random 4-bit codes, with exponents from `low` to `high`."""
    save_moe("gpt_oss", folder, **fields)
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape  # transposed, in the model and in its own files
        shape = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(low, high, shape[:3], dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": excluded,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
