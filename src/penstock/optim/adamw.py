"""`AdamW`, `SGD` and `Lion` for parameters in host memory. Room: update.

Drop-in for torch's own on the CPU: same arguments, same groups, same state keys; faster, and
smaller where `moments` says so. What all three take besides is in `SweepOptions`.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.optim.optimizer import ParamsT

from penstock.errors import SweepInputError
from penstock.optim import rules
from penstock.optim.optimizer import SweepOptimizer, SweepOptions
from penstock.optim.rules import Coefficients


class AdamW(SweepOptimizer):
    """AdamW; with `decoupled_weight_decay=False`, Adam with L2 decay."""

    rule = "adamw"
    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        **shared: Unpack[SweepOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, **shared)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_betas(group["betas"])
        if not group["eps"] >= 0:
            raise SweepInputError("eps", f"must be 0 or more, got {group['eps']}")
        if group.get("amsgrad"):
            raise SweepInputError("amsgrad", "is not supported: it would need a third moment")

    def coefficients(self, group: dict[str, Any], step: int) -> Coefficients:
        return rules.adamw(
            step=step,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            scale=-1.0 if group["maximize"] else 1.0,
        )


class SGD(SweepOptimizer):
    """torch's SGD with momentum, dampening, L2 decay and Nesterov's variant."""

    rule = "sgd"
    moment_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **shared: Unpack[SweepOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, **shared)

    def keeps_moments(self, group: dict[str, Any]) -> bool:
        return float(group["momentum"]) != 0

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if not group["momentum"] >= 0:
            raise SweepInputError("momentum", f"must be 0 or more, got {group['momentum']}")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise SweepInputError("nesterov", "needs momentum above 0 and dampening 0")

    def coefficients(self, group: dict[str, Any], step: int) -> Coefficients:
        return rules.sgd(
            step=step,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            # Without momentum torch ignores dampening.
            dampening=group["dampening"] if self.keeps_moments(group) else 0.0,
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            scale=-1.0 if group["maximize"] else 1.0,
        )


class Lion(SweepOptimizer):
    """Lion (Chen et al., 2023): one moment, and steps of one size. 10 bytes a bf16 parameter."""

    rule = "lion"
    moment_names = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **shared: Unpack[SweepOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, **shared)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        check_betas(group["betas"])

    def coefficients(self, group: dict[str, Any], step: int) -> Coefficients:
        return rules.lion(
            lr=float(group["lr"]),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            scale=-1.0 if group["maximize"] else 1.0,
        )


def check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise SweepInputError("betas", f"are two numbers from 0 to below 1, got {betas}")
