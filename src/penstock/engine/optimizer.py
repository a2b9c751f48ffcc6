"""The optimizer that users and learning-rate schedulers see.

Its parameters have names and shapes but no memory: the values live in tiers and are read through
`engine.state`. `step` asks the engine to apply the update; the arithmetic is in `penstock.optim`
(`optim/rules.py` computes the coefficients, `optim/sweep.py` applies them). The docstring of
`penstock.optim` explains how to add an optimizer for parameters in host memory.

The engine trains with AdamW only. AdamW's two moments and its hyperparameters are built into roles,
plan, checkpoints and settings:

- `roles`: every trained parameter has the roles `FIRST` and `SECOND`. `STATE`, `TRAINED` and
  `Formats` include both, and through them the planner, the transfers and the memory of each tier.
- `plan.workload`: `Workload.optimizer` has the single value `adamw`.
- `settings`: `betas`, `weight_decay`, `moments` and `ScheduleSettings.adamw`. `engine.prepare`
  takes the hyperparameters of AdamW.
- This module: `DEFAULTS`, `StreamedAdamW.coefficients`, and the keys `exp_avg` and `exp_avg_sq` of
  its state dict.
- `engine.engine`: it makes a `StreamedAdamW`, `Engine.apply` starts the rule `adamw`, and
  `EngineState.restore` expects `betas` in every parameter group.
- `engine.state_view`, `engine.initial_weights`, `engine.pending_update`: they read, clear and sweep
  both moments.
- `engine.state_io`: the tensors `<name>.first` and `<name>.second` in checkpoints.
- `optim.sweep_benchmark`: the probe measures AdamW, and plans use its rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.engine.state_view import StateView
from penstock.errors import SweepInputError
from penstock.model.inventory import Inventory
from penstock.optim import rules
from penstock.optim.rules import Coefficients
from penstock.settings import ScheduleSettings

Grouping = Callable[[Iterable[tuple[str, nn.Parameter]]], Sequence[dict[str, Any]]]
"""Makes param groups, in the form torch's optimizers take, from named parameters."""

DEFAULTS: dict[str, Any] = {**ScheduleSettings().adamw, "eps": 1e-8}


def decay_matrices(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return two param groups: matrices with weight decay, norms and biases without.

    The biases of all experts of a layer are one matrix.
    """
    listed = list(named)
    decays = [p.dim() >= 2 and not name.endswith("_bias") for name, p in listed]
    pairs = list(zip(listed, decays, strict=True))
    return [
        {"params": [p for (_, p), decay in pairs if decay]},
        {"params": [p for (_, p), decay in pairs if not decay], "weight_decay": 0.0},
    ]


class Updates(Protocol):
    """The part of an engine that its optimizer uses."""

    inventory: Inventory
    steps: int
    skipped: bool

    @property
    def state(self) -> StateView: ...

    def apply(self) -> None: ...


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW over tiers. `step` fixes the update; the sweeps that apply it run later."""

    def __init__(
        self,
        engine: Updates,
        settings: Mapping[str, Any],
        grouping: Grouping,
        named: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        unknown = set(settings) - set(DEFAULTS)
        if unknown:
            raise SweepInputError(
                "optimizer",
                f"has no option {', '.join(sorted(unknown))}; its options are "
                f"{', '.join(DEFAULTS)}",
            )
        named = named or {
            t.name: nn.Parameter(torch.empty(t.shape, device="meta"))
            for block in engine.inventory.blocks
            for t in block.tensors
            if t.trainable
        }
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._engine = engine
        groups = [g for g in grouping(named.items()) if list(g["params"])]
        super().__init__(groups, {**DEFAULTS, **settings})
        self._check_all_grouped(named)

    def _check_all_grouped(self, named: Mapping[str, nn.Parameter]) -> None:
        grouped = {id(p) for group in self.param_groups for p in group["params"]}
        for name, parameter in named.items():
            if id(parameter) not in grouped:
                raise SweepInputError(
                    name, "is in no param group; add it to a group, or freeze the parameter"
                )

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def coefficients(
        self, step: int, scale: float, tensor_scales: Mapping[str, float] | None = None
    ) -> dict[str, Coefficients]:
        """Return each tensor's coefficients for optimizer step number `step`.

        `scale` multiplies all gradients, and `tensor_scales` those of single tensors in addition.
        They are copies: later changes to the param groups do not affect a pending update.
        """
        coefficients = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                coefficients[name] = rules.adamw(
                    step=step,
                    lr=float(group["lr"]),
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    scale=scale * (tensor_scales or {}).get(name, 1.0),
                )
        return coefficients

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the update with the gradients of the last `forward_backward`."""
        loss = None if closure is None else closure()
        self._engine.apply()
        return loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` changed nothing, under the name that accelerate uses."""
        return self._engine.skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's AdamW, in fp32 on the host.

        The moments need 8 bytes of host memory per parameter. To save a checkpoint, use
        `engine.write`, which needs no such memory.
        """
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = self._engine.state
        for number, parameter in enumerate(parameters):
            tensors = state[self.name_of(parameter)]
            packed["state"][number] = {
                "step": torch.tensor(float(self._engine.steps)),
                "exp_avg": tensors["exp_avg"],
                "exp_avg_sq": tensors["exp_avg_sq"],
            }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, or of torch's AdamW over the same parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = state_dict["state"]
        if not states:
            return
        named = {self.name_of(p): states[number] for number, p in enumerate(parameters)}
        self._engine.state.write_moments(named)
        self._engine.steps = int(next(iter(named.values()))["step"])

    def note_step(self) -> None:
        """Record that a step was made: LR schedulers warn if they are called before the first."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `step` consumes the gradients."""
