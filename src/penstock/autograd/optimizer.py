"""The optimizer of a streamed model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.autograd.parameters import CHANGED, Gradients
from penstock.engine.engine import Engine
from penstock.engine.initial_weights import set_weights
from penstock.engine.optimizer import Grouping, StreamedOptimizer
from penstock.errors import EngineError
from penstock.machine.limits import host_memory
from penstock.machine.sysfs import System
from penstock.units import format_bytes

STATE_NBYTES = 12
"""Bytes of host memory per parameter that a state dict takes: both moments and the master weight in
fp32."""


class StreamedModelOptimizer(StreamedOptimizer):
    """The optimizer over the parameters of a streamed model."""

    def __init__(
        self, engine: Engine, gradients: Gradients, settings: Mapping[str, Any],
        grouping: Grouping, parameters: Mapping[str, nn.Parameter],
    ) -> None:  # fmt: skip
        named = {name: p for name, p in parameters.items() if p.requires_grad}
        super().__init__(engine, settings, grouping, named)
        self._streamed, self._gradients, self._parameters = engine, gradients, parameters
        self._trained = named.keys()
        self._versions = {name: parameter._version for name, parameter in parameters.items()}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients of all backward passes since the last step.

        Sweeps of streamed blocks run during the next forward pass; those of the head now.
        """
        if closure is None:
            loss = None
        else:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        self._check_unused()
        scales = dict(self._gradients.scales)
        self._gradients.scales.clear()
        self._streamed.apply(scales)
        self._streamed.clear_gradients()
        self._streamed.keeps_gradients = True  # until `zero_grad`
        return loss

    def _check_unused(self) -> None:
        """Raise EngineError if the loss did not depend on a tensor of the head.

        Layers always get gradients: the survey refuses a model that does not use a tensor.
        """
        if not self._streamed.has_gradients:
            return
        for name in sorted(self._streamed.held_without_gradient):
            raise EngineError(
                f"{name} got no gradient, because the loss does not depend on it. torch would "
                f"leave it as it is, and the engine would apply its weight decay and momentum. "
                f"Freeze it before penstock.stream, with requires_grad_(False) or freeze={name!r}"
            )

    def _check_parameters(self) -> None:
        """Raise EngineError if parameters were frozen, unfrozen or changed by the caller.

        Freezing is not refused earlier: PEFT freezes an adapter while it is switched off.
        """
        for name, parameter in self._parameters.items():
            # The engine writes the weights of the head through another tensor.
            if parameter._version != self._versions[name]:
                raise EngineError(CHANGED.format(name=name))
            if parameter.requires_grad != (name in self._trained):
                raise EngineError(
                    f"{name}.requires_grad was set to {parameter.requires_grad} after "
                    f"penstock.stream, which decides what is trained. Set it back, or close the "
                    f"model, freeze or unfreeze its parameters, and stream it again. To leave "
                    f"parameters as they are for some steps, set lr=0 and weight_decay=0 in their "
                    f"parameter group"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were computed."""
        self._gradients.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return moments and master weights, in fp32 in host memory: 12 bytes per parameter.

        Before the first step it has no state, as in torch. `model.save_checkpoint` saves the same
        without that memory.
        """
        if self._streamed.steps == 0:
            return torch.optim.Optimizer.state_dict(self)
        needed = STATE_NBYTES * self._streamed.inventory.parameters(True)
        free = host_memory(System()).free
        if needed > free:
            raise EngineError(
                f"the state dict of the optimizer needs {format_bytes(needed)} of host memory, and "
                f"{format_bytes(free)} are free. Save a checkpoint with "
                f"model.save_checkpoint(folder), which needs no such memory; in Trainer, set "
                f"save_only_model=True"
            )
        packed = super().state_dict()
        names = [self.name_of(p) for group in self.param_groups for p in group["params"]]
        state = self._streamed.state
        for number, name in enumerate(names):
            packed["state"][number]["master"] = state[name]["master"]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, or of torch's AdamW over the same parameters.

        With master weights in it, the model's weights become those.
        """
        states = state_dict["state"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        if states and all("master" in each for each in states.values()):
            masters = {self.name_of(p): states[i]["master"] for i, p in enumerate(parameters)}
            frozen = set(self._streamed.state) - set(masters)
            weights = {name: self._streamed.state[name]["weight"] for name in frozen}
            self._streamed.replace_weights(
                lambda engine: set_weights(engine.access, engine.inventory, masters | weights)
            )
        super().load_state_dict(state_dict)
