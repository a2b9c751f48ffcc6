"""The optimizer that users and LR schedulers see. Room: move.

Its parameters have shapes and names, no memory: what they hold rests in tiers and is read through
`engine.state`.
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

Grouping = Callable[[Iterable[tuple[str, nn.Parameter]]], Sequence[dict[str, Any]]]
"""From names and parameters to param groups, as torch's optimizers take them."""

DEFAULTS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def decay_matrices(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two groups: norms and biases are not decayed."""
    listed = list(named)
    return [
        {"params": [p for _, p in listed if p.dim() >= 2]},
        {"params": [p for _, p in listed if p.dim() < 2], "weight_decay": 0.0},
    ]


class Updates(Protocol):
    """What an optimizer asks of an engine."""

    inventory: Inventory
    steps: int

    @property
    def state(self) -> StateView: ...

    def apply(self) -> None: ...


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW over tiers: `step` fixes what the coming sweeps will do."""

    def __init__(
        self,
        engine: Updates,
        settings: Mapping[str, Any],
        grouping: Grouping,
    ) -> None:
        unknown = set(settings) - set(DEFAULTS)
        if unknown:
            raise SweepInputError("optimizer", f"has no setting {', '.join(sorted(unknown))}; "
                                  f"it has {', '.join(DEFAULTS)}")  # fmt: skip
        named = {
            t.name: nn.Parameter(torch.empty(t.shape, device="meta"))
            for block in engine.inventory.blocks
            for t in block.tensors
            if t.trainable
        }
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._engine = engine
        groups = [g for g in grouping(named.items()) if list(g["params"])]
        super().__init__(groups, {**DEFAULTS, **settings})
        self._check_all_in(named)

    def _check_all_in(self, named: Mapping[str, nn.Parameter]) -> None:
        grouped = {id(p) for group in self.param_groups for p in group["params"]}
        for name, parameter in named.items():
            if id(parameter) not in grouped:
                raise SweepInputError(name, "is in no param group; freeze it, or put it in one")

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def coefficients(self, step: int, scale: float) -> dict[str, Coefficients]:
        """Per tensor, for optimizer step `step`: later changes to groups do not alter them."""
        found = {}
        for group in self.param_groups:
            by = rules.adamw(
                step=step,
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                scale=scale,
            )
            found.update({self._names[id(p)]: by for p in group["params"]})
        return found

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        self._engine.apply()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's AdamW has it, in fp32 on the host: three times the model's size. For keeping,
        `engine.write` needs no such room."""
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        view = self._engine.state
        for number, parameter in enumerate(parameters):
            held = view[self.name_of(parameter)]
            packed["state"][number] = {
                "step": torch.tensor(float(self._engine.steps)),
                "exp_avg": held["exp_avg"],
                "exp_avg_sq": held["exp_avg_sq"],
            }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From such a dict, or one of torch's AdamW over the same parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = state_dict["state"]
        if not states:
            return
        named = {self.name_of(p): states[number] for number, p in enumerate(parameters)}
        self._engine.state.write_moments(named)
        self._engine.steps = int(next(iter(named.values()))["step"])

    def note_step(self) -> None:
        """For LR schedulers, which warn where no step came before theirs."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are taken by `step`; there is nothing to clear."""
