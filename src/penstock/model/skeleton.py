"""A transformers model without memory for its parameters. Room: move."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import UnsupportedModelError
from penstock.model import attention
from penstock.model.inventory import Inventory
from penstock.roles import Dtype


def build_model(
    config: Any, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> nn.Module:
    """Its modules and buffers for real, its parameters without memory."""
    import transformers

    attention.register()
    make: Any = transformers.AutoModelForCausalLM
    with _without_parameters():
        model: nn.Module = make.from_config(
            copy.deepcopy(config),  # whose attention is set to ours
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code,
        )
    return to_device(model, device)


def weight_dtype(dtype: Dtype) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


def strip_model(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Take a live model's parameters away, keeping ties; whoever holds them keeps them."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None:
                bare = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
                module._parameters[name] = empty.setdefault(id(held), bare)
    config: Any = model.config
    config._attn_implementation = attention.NAME
    config.dtype = dtype
    return to_device(model, device)


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Buffers only."""
    for module in model.modules():
        for name, held in module._buffers.items():
            if held is not None:
                module._buffers[name] = held.to(device)
    return model


def check_trainable(inventory: Inventory) -> None:
    """Raise UnsupportedModelError for what training refuses."""
    if inventory.not_trainable:
        raise UnsupportedModelError(f"{inventory.model}: {inventory.not_trainable}")
    for tensor in inventory.blocks[0].tensors:
        if len(tensor.shape) != 2:
            raise UnsupportedModelError(
                f"{inventory.model}: {tensor.name} of shape {tensor.shape} comes before the "
                f"layers and is no table; only models whose embedding is linear can be trained yet"
            )


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    """Parameters made inside have shapes and no memory; ties are kept, for those come later."""
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(self, name, param)
        if param is not None and param.device.type != "meta":
            bare = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            self._parameters[name] = bare

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
