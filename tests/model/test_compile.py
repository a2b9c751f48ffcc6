"""Layers of one kind share code, but none of their tensors."""

from __future__ import annotations

import torch
from torch import nn

from penstock.model.compile import CompiledLayers


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
        assert torch.equal(body(*arguments), layer(hidden))
