"""Build transformers models whose parameters take no memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import UnsupportedModelError
from penstock.model.attention import DOCUMENTS
from penstock.model.document_attention import register_document_attention
from penstock.model.inventory import Inventory
from penstock.model.rotary import choose_frequencies_by_document
from penstock.roles import Dtype

_ADVICE = "warn_if_padding_and_no_attention_mask"
"""Method of transformers models, which some of them call."""


def build_model(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    own_attention: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Build a model from its config: its buffers on the device, its parameters without memory.

    With `own_attention`, the model keeps the attention that transformers chooses for its class.
    """
    import transformers

    register_document_attention()
    make: Any = transformers.AutoModelForCausalLM
    with without_parameters():
        model: nn.Module = make.from_config(
            copy.deepcopy(config),  # a copy, because the model's attention is set in it
            dtype=dtype,
            attn_implementation=None if own_attention else DOCUMENTS,
            trust_remote_code=trust_remote_code,
        )
    _remove_advice_about_padding(model)
    return move_buffers(choose_frequencies_by_document(model), device)


def _remove_advice_about_padding(model: nn.Module) -> None:
    """Do not let models recommend an attention mask: padding is a document of its own here."""
    for module in model.modules():
        if hasattr(module, _ADVICE):
            setattr(module, _ADVICE, _give_no_advice)


def _give_no_advice(*_: Any) -> None:
    pass


def weight_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's name of a weight type."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]


def check_own_attention(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a live model uses another attention than was checked."""
    config: Any = model.config
    checked = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    if config._attn_implementation != checked:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention with its own code, which Penstock has "
            f"checked for attn_implementation={checked!r}, but the model was loaded with "
            f"{config._attn_implementation!r}; load it with attn_implementation={checked!r}"
        )


def remember_model(model: nn.Module) -> Callable[[], None]:
    """Return a function that undoes what is done to a model's modules and config from now on.

    A survey takes a model apart, and gives it back with the weights that it had.
    """
    holders = ("_parameters", "_buffers", "_modules")
    modules = [
        (module, dict(vars(module)), [dict(vars(module)[name]) for name in holders])
        for module in model.modules()
    ]
    config = dict(vars(model.config))

    def restore() -> None:
        for module, attributes, contents in modules:
            _set_contents(vars(module), attributes)
            for name, content in zip(holders, contents, strict=True):
                _set_contents(vars(module)[name], content)
        _set_contents(vars(model.config), config)

    return restore


def _set_contents(into: dict[str, Any], contents: dict[str, Any]) -> None:
    into.clear()
    into.update(contents)


def gpus_of(model: nn.Module) -> list[torch.device]:
    """Return the GPUs that parameters of a model are on: those whose random state it may change."""
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def move_buffers(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model's buffers, and only these, to a device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def check_trainable(inventory: Inventory, *, own_loss: bool = False) -> None:
    """Raise UnsupportedModelError if Penstock cannot train the model.

    `own_loss` is set if the caller brings a loss in place of the model's.
    """
    if reason := inventory.not_trainable or ("" if own_loss else inventory.own_loss):
        raise UnsupportedModelError(f"{inventory.model}: {reason}")


@contextlib.contextmanager
def without_parameters() -> Iterator[None]:
    """Move every parameter that a module registers inside the block to the meta device.

    No initial values are drawn for them. Ties survive, because transformers ties parameters after
    it has created all of them.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is None:
            return
        if param.device.type != "meta":
            param = self._parameters[name] = on_meta(param)
        # Makes transformers draw no initial values for it. Here that would change nothing, but
        # torch runs random functions of the meta device in Python: about 1 ms for each parameter.
        param._is_hf_initialized = True  # type: ignore[attr-defined]

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape and type without memory."""
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
