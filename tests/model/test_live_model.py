"""Models in memory whose weights an engine takes: which of them a copy can stand in for."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import nn

import penstock
from penstock.errors import EngineError, UnsupportedModelError
from penstock.model.live_model import LiveModel
from tests.support.engines import plain_model, tiny_config

OPTIONS: dict[str, Any] = {
    "dtype": "fp32", "device": "cpu", "self_check": False,
    "budget": {"hbm": "64MiB", "dram": "64MiB"},
}  # fmt: skip


def tiny() -> Any:
    return plain_model(tiny_config("llama", num_hidden_layers=1), torch.float32)


def halve(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) / 2


def halve_with_a_global(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    script = {"__name__": "__main__", "former": mlp.forward}
    mlp.forward = eval("lambda hidden: former(hidden) / 2", script)


def halve_a_partial(model: Any) -> None:
    head, forward = model.lm_head, model.lm_head.forward
    head.forward = functools.partial(lambda factor, hidden: factor * forward(hidden), 0.5)


def add_another_module(model: Any) -> None:
    head = model.lm_head
    model.model.norm.register_forward_hook(lambda _module, _inputs, out: out + head.weight[0])


def keep_a_list(model: Any) -> None:
    model.model.layers[0].steps = [lambda hidden: model.lm_head(hidden) / 2]


def compile_the_layer(model: Any) -> None:
    layer = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager")


def compile_the_model(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (halve, r"layers\.0\.mlp has a function as its forward"),
        (halve_with_a_global, r"layers\.0\.mlp has a function as its forward"),
        (halve_a_partial, "lm_head has a function as its forward that uses lm_head"),
        (add_another_module, r"model\.norm has a hook that uses lm_head"),
        (keep_a_list, r"layers\.0 has a function as its steps that uses the model"),
        (compile_the_layer, r"layers\.0 has a compiled forward.* without torch\.compile"),
        (compile_the_model, "the model has a compiled forward"),
    ],
)
def test_functions_that_would_compute_with_the_original_are_refused(
    change: Callable[[Any], None], problem: str
) -> None:
    model = tiny()
    change(model)
    with pytest.raises(UnsupportedModelError, match=problem):
        penstock.prepare(model, context=16, batch=1, **OPTIONS)
    with pytest.raises(UnsupportedModelError, match=problem):
        penstock.stream(model, tokens=16, **OPTIONS)


def bind_a_method(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, hidden: type(self).forward(self, hidden) / 2, mlp)


def record_with_hooks(model: Any) -> None:
    shapes: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: shapes.append(out.shape))
    model.enable_input_require_grads()


def add_accelerates_hooks(model: Any) -> None:
    hook = accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True)
    accelerate.hooks.add_hook_to_module(model.model.layers[0], hook)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def compute_a_weight(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())


def adapt(model: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules="all-linear", use_dora=True)
    adapted: Any = peft.get_peft_model(model, config)
    adapted.enable_input_require_grads()
    return adapted


@pytest.mark.parametrize(
    "change",
    [bind_a_method, record_with_hooks, add_accelerates_hooks, compute_a_weight, adapt],
)
def test_functions_that_are_copied_or_use_plain_data_are_taken(
    change: Callable[[Any], Any],
) -> None:
    model = tiny()
    model = change(model) or model
    live = LiveModel(model)
    copied = live.copy_without_weights(torch.device("cpu"), torch.float32)
    live.put_back()
    ours = {id(module) for module in live.model.modules()}
    assert not ours & {id(module) for module in copied.modules()}


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused_with_what_to_do_instead(kind: str) -> None:
    model = tiny()
    handle = getattr(model.model.norm.weight, kind)(lambda gradient: None)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has a hook.*freeze it"):
        penstock.prepare(model, context=16, batch=1, **OPTIONS)
    model.model.norm.weight.requires_grad_(False)
    LiveModel(model)
    model.model.norm.weight.requires_grad_(True)
    handle.remove()
    LiveModel(model)


def scale(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def freeze(model: Any) -> None:
    model.lm_head.requires_grad_(False)


def set_data(model: Any) -> None:
    model.lm_head.weight.data = torch.zeros(260, 32)


@pytest.mark.parametrize(
    "use",
    [
        scale,
        freeze,
        set_data,
        copy.deepcopy,
        lambda model: model.lm_head.weight.norm().item(),
        lambda model: torch.zeros(260, 32).copy_(model.lm_head.weight),
        lambda model: model.lm_head.weight.to(torch.bfloat16),
        lambda model: model.lm_head.weight.register_hook(print),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ],
)
def test_weights_that_an_engine_trains_cannot_be_used(use: Callable[[Any], Any]) -> None:
    model = tiny()
    engine = penstock.prepare(model, context=16, batch=1, **OPTIONS)
    with engine, pytest.raises(EngineError, match=r"\.weight.*this Llama.* engine\.restore"):
        use(model)
    use(model)


def test_properties_of_weights_that_an_engine_trains_are_those_of_the_model() -> None:
    model, plain = tiny(), tiny()
    plain.model.norm.requires_grad_(False)
    model.model.norm.requires_grad_(False)
    with penstock.prepare(model, context=16, batch=1, **OPTIONS):
        model.zero_grad()
        model.eval()
        model.lm_head.requires_grad_(True)
        names = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            expected = names.pop(name)
            assert isinstance(parameter, nn.Parameter)
            assert parameter.device.type == parameter.data.device.type == "meta"
            for field in ("shape", "dtype", "requires_grad", "is_leaf", "ndim", "nbytes"):
                assert getattr(parameter, field) == getattr(expected, field), (name, field)
        assert not names
        assert model.num_parameters() == plain.num_parameters()
        assert model.dtype == plain.dtype
    assert "zero_grad" not in vars(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not model.model.norm.weight.requires_grad
