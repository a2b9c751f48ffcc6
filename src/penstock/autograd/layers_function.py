"""The autograd function that takes the place of a model's embedding and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.autograd.module_modes import Modes, apply_modes
from penstock.engine.engine import Engine
from penstock.errors import EngineError
from penstock.model.split import MicroBatch

CREATE_GRAPH = (
    "gradients of gradients (create_graph=True) are not supported for a streamed model: the "
    "gradients of its layers are summed outside of autograd"
)


class _StreamedLayers(torch.autograd.Function):
    """Streams the blocks forward, and backward in reverse.

    Its only differentiable input is a scalar that nothing is computed from: autograd calls
    `backward` only if an input requires a gradient. Gradients of weights go to the engine.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, engine: Engine, micros: Sequence[MicroBatch],
        modes: Modes, training: bool,
    ) -> torch.Tensor:  # fmt: skip
        apply_modes(modes)
        output = engine.forward_pass(micros, training=training)
        # The activations are kept as long as the graph refers to `live`.
        ctx.engine, ctx.live, ctx.modes = engine, output.live, modes
        return output.hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        if torch.is_grad_enabled():  # only with create_graph=True
            ctx.live.release()
            ctx.engine.clear_gradients()
            raise EngineError(CREATE_GRAPH)
        apply_modes(ctx.modes)  # the caller may have changed its modules since
        ctx.engine.backward_pass(ctx.live, gradient)
        return None, None, None, None, None


def run_layers(
    engine: Engine, micros: Sequence[MicroBatch], modes: Modes, *, training: bool
) -> torch.Tensor:
    """Return the output of the last layer, `[rows, tokens, hidden size]`."""
    if any(values.get("p") for _, values in modes):  # the caller has switched dropout on
        engine.split_model.drops_out = True
    if not (torch.is_grad_enabled() and engine.trains_layers):
        apply_modes(modes)
        return engine.inference_pass(micros, training=training)
    anchor = torch.zeros((), device=engine.device.torch_device, requires_grad=True)
    out: torch.Tensor = _StreamedLayers.apply(anchor, engine, micros, modes, training)  # type: ignore[no-untyped-call]
    return out
