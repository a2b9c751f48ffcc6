"""Layers of one kind share code, but none of their tensors, and run compiled where they can."""

from __future__ import annotations

from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.model.compile import CompiledLayers, layer_kinds
from penstock.model.split import SplitModel
from penstock.model.varlen_attention import DocumentSpans, flatten_bounds


class _Scaled(nn.Module):
    """A layer with a parameter and a buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(hidden) * self.scale
        return scaled


def test_each_layer_computes_with_its_own_buffers() -> None:
    layers = [_Scaled(2.0), _Scaled(3.0)]
    compiled = CompiledLayers(layers)
    hidden = torch.randn(1, 4)

    for index, layer in enumerate(layers):
        body, arguments = compiled.plain_call(index, hidden, (), {}, None)
        assert torch.equal(body(*arguments)[0], layer(hidden))


@pytest.mark.parametrize(
    ("own", "bounds", "draws", "tokens", "compiled"),
    [
        (False, None, False, 12, True),
        (True, None, False, 12, False),
        (False, [[0, 3], [0, 1, 3]], False, 12, False),
        (False, flatten_bounds([[0, 1, 3]], torch.device("cpu")), False, 12, True),
        (False, None, True, 6, True),  # one whole tile draws its dropout once
        (False, None, True, 7, False),
        (False, None, False, 7, True),
    ],
)
def test_layers_are_compiled_unless_documents_or_tiles_rule_it_out(
    own: bool, bounds: Any, draws: bool, tokens: int, compiled: bool
) -> None:
    called: list[Any] = []
    model: Any = SimpleNamespace(
        inventory=SimpleNamespace(own_attention=own),
        _draws_in_tiles=draws,
        _tile=6,
        _compiled=SimpleNamespace(plain_call=lambda *given: called.append(given) or "call"),
    )
    model._can_compile = partial(SplitModel._can_compile, model)
    hidden = torch.zeros(1, tokens, 4)
    calls: Any = SimpleNamespace(bounds=bounds, arguments=[("a", "b"), ("c", "d")])

    found = SplitModel.compiled_call(model, 1, hidden, calls)

    assert found == ("call" if compiled else None)
    spans = bounds if isinstance(bounds, DocumentSpans) else None
    assert called == ([(1, hidden, "c", "d", spans)] if compiled else [])
    model._compiled = None
    assert SplitModel.compiled_call(model, 1, hidden, calls) is None


def scaled_by(factor: float) -> Any:
    return lambda hidden: hidden * factor


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda part, index: setattr(part, "forward", scaled_by(2.0)), 1),
        (lambda part, index: setattr(part, "forward", scaled_by(float(index))), 3),
        (lambda part, index: setattr(part, "forward", partial(torch.mul, other=index)), 3),
        (lambda part, index: setattr(part, "forward", MethodType(nn.Module.forward, part)), 1),
        (lambda part, index: index == 1 and setattr(part, "forward", scaled_by(2.0)), 2),
        (lambda part, index: index == 1 and part.register_forward_hook(lambda *_: None), 2),
        (lambda part, index: setattr(part, "sizes", [index]), 3),
        (lambda part, index: setattr(part, "factor", torch.ones(1)), 1),
        (lambda part, index: setattr(part, "factor", torch.full((1,), index)), 3),
    ],
)
def test_layers_with_functions_of_a_caller_are_of_other_kinds(change: Any, kinds: int) -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.Identity()) for _ in range(3)]
    for index, layer in enumerate(layers):
        change(layer[1], index)
    assert len(set(layer_kinds(layers))) == kinds
