"""The optimizer that users and LR schedulers see. Room: move.

Its parameters have shapes and names, no memory: what they hold rests in tiers and is read through
`engine.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import SweepInputError
from penstock.inventory import Inventory
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


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW over tiers: `step` fixes what the coming sweeps will do."""

    def __init__(
        self,
        inventory: Inventory,
        settings: Mapping[str, Any],
        grouping: Grouping,
        apply: Callable[[], None],
    ) -> None:
        unknown = set(settings) - set(DEFAULTS)
        if unknown:
            raise SweepInputError("optimizer", f"has no setting {', '.join(sorted(unknown))}; "
                                  f"it has {', '.join(DEFAULTS)}")  # fmt: skip
        named = {
            t.name: nn.Parameter(torch.empty(t.shape, device="meta"))
            for block in inventory.blocks
            for t in block.tensors
            if t.trainable
        }
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._apply = apply
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
        self._apply()
        return loss

    def note_step(self) -> None:
        """For LR schedulers, which warn where no step came before theirs."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are taken by `step`; there is nothing to clear."""
