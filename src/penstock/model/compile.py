"""One compiled body for all layers that are alike. Room: move.

Weights are arguments, not attributes, and so is where documents begin: whatever slot a block is in
and however a batch is packed, the same code runs, and nothing is compiled again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.model import attention
from penstock.model.layer_kinds import firsts, layer_kinds, raise_recompile_limit
from penstock.model.varlen_attention import Cuts


class CompiledLayers:
    """Layers by number, run by the compiled body of the first one of their kind, as it is before
    weights are bound."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        raise_recompile_limit()
        self._names = [[name for name, _ in layer.named_parameters()] for layer in layers]
        kinds = layer_kinds(layers)
        first = firsts(kinds)
        # Compiled code that finds its arguments in the layer too would not do for another layer.
        self._shells = [copy.deepcopy(layers[index]) for index in first.values()]
        bodies = dict(zip(first, map(_compile, self._shells), strict=True))
        self._bodies: list[Callable[..., torch.Tensor]] = [bodies[kind] for kind in kinds]

    def train(self, training: bool) -> None:
        for shell in self._shells:
            shell.train(training)

    def __call__(
        self,
        index: int,
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cuts: Cuts | None,
    ) -> torch.Tensor:
        layer = self._layers[index]
        weights = {name: layer.get_parameter(name) for name in self._names[index]}
        return self._bodies[index](weights, hidden, args, kwargs, cuts)


def _compile(layer: nn.Module) -> Callable[..., torch.Tensor]:
    def run(
        weights: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        args: Any,
        kwargs: Any,
        cuts: Cuts | None,
    ) -> torch.Tensor:
        with attention.documents(cuts):
            out: Any = torch.func.functional_call(layer, weights, (hidden, *args), kwargs)
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    made: Callable[..., torch.Tensor] = torch.compile(run, dynamic=False)
    return made


def was_compiled(model: Any) -> bool:
    """Whether some part of it is run by what `torch.compile` has made of it."""
    return any(
        part._compiled_call_impl is not None
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
        for part in model.modules()
    )
