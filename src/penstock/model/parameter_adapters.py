"""Compute adapters of parameters: what PEFT does for `target_parameters`, layer by layer.

PEFT wraps a module, such as the fused experts of a layer, in one `ParamWrapper` for each parameter
that has an adapter. Its own forward pass adds the product of the two factors to the parameter, as a
parametrization that it registers for the call and removes afterwards. For experts that product is
as large as all experts together, and compiled code cannot contain the registration.

Here, the wrappers of experts are passed through: the function that multiplies tokens with experts
multiplies them with the factors as well (`penstock.model.experts`). Other parameters with an
adapter, such as the weight of a router, are small: the sum takes the place of the parameter while
the module runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.model.experts import PROJECTIONS, add_factors, has_fused_experts


def replace_parametrizations(layers: Sequence[nn.Module]) -> None:
    """Let adapters of parameters compute without parametrizations from now on."""
    for layer in layers:
        for wrapper in find_wrappers(layer):
            base = wrapper.get_base_layer()
            if has_fused_experts(base) and wrapper.parameter_name in PROJECTIONS:
                add_factors(base, wrapper.parameter_name, wrapper)
                wrapper.forward = _PassThrough(wrapper)
            else:
                wrapper.forward = _WithSum(wrapper)


def find_wrappers(layer: nn.Module) -> Iterator[Any]:
    """Yield PEFT's wrappers of parameters in a layer, the outer ones first."""
    if "peft" not in sys.modules:  # then no module is PEFT's
        return
    from peft.tuners.lora.layer import ParamWrapper

    for module in layer.modules():
        if isinstance(module, ParamWrapper):
            yield module


def outermost(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Return the outermost wrapper of a module, or the module itself if it has none."""
    return next((w for w in find_wrappers(layer) if w.get_base_layer() is module), module)


class _PassThrough:
    """The `forward` of a wrapper that calls what it wraps."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper.base_layer(*args, **kwargs)


class _WithSum:
    """The `forward` of a wrapper that calls what it wraps with the adapter added to a parameter."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        inner, depth = wrapper.base_layer, 0
        while inner is not wrapper.get_base_layer():
            inner, depth = inner.base_layer, depth + 1
        self.name = "base_layer." * depth + wrapper.parameter_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self.wrapper
        if wrapper.disable_adapters:
            return wrapper.base_layer(*args, **kwargs)
        total = wrapper.get_param()
        for name in wrapper.active_adapters:
            total = total + wrapper.get_delta_weight(name)
        return torch.func.functional_call(wrapper.base_layer, {self.name: total}, args, kwargs)
