"""`torch.optim` optimizers for parameters in host memory: `AdamW`, `SGD` and `Lion`.

They are drop-in replacements for torch's optimizers on the CPU, with the same arguments, parameter
groups and state keys. They are faster, and smaller with compressed `moments`. `SweepOptions` lists
the additional arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import torch
from torch.optim.optimizer import ParamsT

from penstock.errors import NonFiniteGradientError, SweepInputError
from penstock.optim import formats, rules
from penstock.optim.formats import Moments, StateFormat
from penstock.optim.rules import Coefficients, RuleName, draw_key
from penstock.optim.sweep import Pool, Segment, SweepTicket, grad_stats, start

NonFinite = Literal["refuse", "trust"]
_Entry = tuple[str, torch.Tensor, dict[str, Any]]
"""A parameter with its name for messages, and its group."""


class SweepOptions(TypedDict, total=False):
    """Keyword arguments that every optimizer accepts in addition to its own."""

    moments: Moments
    """Storage format of the moments: "fp32" (exact, the default), "bf16" or "int8". The last two
    use stochastic rounding."""
    maximize: bool
    """Whether to maximize the objective instead of minimizing it."""
    nonfinite: NonFinite
    """Whether to check all gradients first: "refuse" (the default) raises if one is not finite,
    "trust" skips the check. The engine's setting of this name takes "raise" and "skip" instead: it
    always checks, and chooses between an error and a skipped step."""
    seed: int
    """Seed of stochastic rounding."""
    pool: Pool | None
    """Threads to use; by default, those of `default_pool()`."""


class SweepOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers.

    Parameters are contiguous host tensors in fp32, bf16 or fp16; a group may mix them. The state
    of a bf16 weight includes a 16-bit remainder (`low`), and that of an fp16 weight an fp32
    `master`, so that small updates are not lost. Moments have the same names as in torch, or
    `<name>_code` and `<name>_base` if they are 8-bit.
    """

    rule: ClassVar[RuleName]
    """Update rule of the sweep."""

    moment_names: ClassVar[tuple[str, ...]]
    """Names of the moments in the state, as in torch."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        moments: Moments = "fp32",
        maximize: bool = False,
        nonfinite: NonFinite = "refuse",
        seed: int = 0,
        pool: Pool | None = None,
    ) -> None:
        if nonfinite not in ("refuse", "trust"):
            raise SweepInputError("nonfinite", f"must be 'refuse' or 'trust', got {nonfinite!r}")
        StateFormat(moments=moments)  # raises if there is no such format
        self.moments, self.nonfinite, self.pool = moments, nonfinite, pool
        super().__init__(params, {**defaults, "maximize": maximize, "seed": seed})

    @abstractmethod
    def coefficients(self, group: dict[str, Any], step: int) -> Coefficients:
        """Return the group's constants for step number `step`, counted from 1."""

    def keeps_moments(self, group: dict[str, Any]) -> bool:
        """Return whether parameters of this group have moments."""
        return True

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise SweepInputError if a setting of the group is invalid."""
        lr = group["lr"]
        if not float(lr) >= 0:
            raise SweepInputError("lr", f"must be 0 or more, got {lr}")
        if not group["weight_decay"] >= 0:
            raise SweepInputError("weight_decay", f"must be 0 or more, got {group['weight_decay']}")

    # Stepping.

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        With `nonfinite="refuse"`, all gradients are checked first, which reads 2 to 4 bytes per
        parameter, and a gradient that is not finite raises before anything changes. "trust" skips
        the check.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = [e for e in self._entries() if e[1].grad is not None]
        for name, param, _ in entries:
            _check_grad(name, param)
        if self.nonfinite == "refuse":
            self._refuse_nonfinite(entries)
        for ticket in self._start(entries):
            ticket.wait()
        return loss

    def _entries(self) -> Iterable[_Entry]:
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for k, param in enumerate(group["params"]):
                yield (names[k] if names else f"group {i} parameter {k}"), param, group

    def _refuse_nonfinite(self, entries: list[_Entry]) -> None:
        stats = grad_stats([_grad(param) for _, param, _ in entries], pool=self.pool)
        if stats.first_bad is not None:
            raise NonFiniteGradientError(entries[stats.first_bad[0]][0], stats.first_bad[1])

    def _start(self, entries: list[_Entry]) -> list[SweepTicket]:
        """Start one job for each storage format. Step counts increase only if all jobs started."""
        # Number all parameters, with or without a gradient: the random bits of stochastic rounding
        # depend on the number, which must not change from step to step.
        ids = {param: i for i, (_, param, _) in enumerate(self._entries())}
        jobs: dict[tuple[Any, ...], list[Segment]] = {}
        for name, param, group in entries:
            state = self.state[param]
            if not state:
                state.update(self._fresh_state(param, group))
            step = int(state["step"].item()) + 1
            segment = Segment(
                name=name,
                by=self.coefficients(group, step),
                grad=_grad(param),
                weight=param,
                key=draw_key(group["seed"], step, ids[param]),
                **self._buffers(state),
            )
            kind = (param.dtype, self.keeps_moments(group))
            jobs.setdefault(kind, []).append(segment)
        # `start` raises on invalid input: count the step only after every job has started.
        tickets = [start(self.rule, segments, pool=self.pool) for segments in jobs.values()]
        for _, param, _ in entries:
            self.state[param]["step"] += 1
        return tickets

    def _buffers(self, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        buffers = {"rest": state.get("low", state.get("master"))}
        for role, name in zip(("first", "second"), self.moment_names, strict=False):
            buffers[role] = state.get(f"{name}_code", state.get(name))
            buffers[f"{role}_base"] = state.get(f"{name}_base")
        return buffers

    # State.

    def _fresh_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        state = {"step": torch.tensor(0.0, dtype=torch.float32)}
        if self.keeps_moments(group):
            zeros = torch.zeros_like(param, dtype=torch.float32)
            for name in self.moment_names:
                state.update(self._encode(zeros, name))
        if (rest := formats.fresh_rest(param)) is not None:
            state["low" if param.dtype == torch.bfloat16 else "master"] = rest
        return state

    def _encode(self, value: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
        second = name == self.moment_names[-1] and len(self.moment_names) == 2
        return formats.write_moment(value, name, self.moments, second=second)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's optimizer, with moments in any format.

        Moments in the same format are loaded bit for bit; others are converted through fp32. If
        the state has no master weight, the current weight is used.
        """
        current = self.param_groups
        saved = state_dict["param_groups"]
        groups = [
            {**{k: v for k, v in now.items() if k != "params"}, **then}
            for now, then in zip(current, saved, strict=False)
        ]
        for group in groups:
            self.check_group(group)
        super().load_state_dict({"state": {}, "param_groups": groups + saved[len(groups) :]})
        ids = [i for group in saved for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            if i in state_dict["state"]:
                self.state[param] = self._load_state(state_dict["state"][i], param)

    def _load_state(self, saved: dict[str, Any], param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {"step": torch.as_tensor(saved.get("step", 1), dtype=torch.float32).clone().cpu()}
        for name in self.moment_names:
            if saved.get(name) is None and f"{name}_code" not in saved:
                continue
            second = name == self.moment_names[-1] and len(self.moment_names) == 2
            plain = formats.StateFormat(moments=self.moments).moment_dtype
            if self.moments == "int8" and f"{name}_code" in saved:
                for key in (f"{name}_code", f"{name}_base"):
                    state[key] = saved[key].clone()
            elif name in saved and saved[name].dtype == plain:
                state[name] = saved[name].clone()
            else:
                value = formats.read_moment(saved, name, second=second).view(param.shape)
                state.update(self._encode(value, name))
        if (fresh := formats.fresh_rest(param)) is not None:
            name = "low" if param.dtype == torch.bfloat16 else "master"
            state[name] = saved[name].clone() if name in saved else fresh
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking all its parameters, as in torch."""
        self.check_group({**self.defaults, **param_group})
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        group_number = len(self.param_groups)
        for i, item in enumerate(params):
            param = item[1] if isinstance(item, tuple) else item
            if isinstance(param, torch.Tensor):
                _check_param(f"group {group_number} parameter {i}", param)
        super().add_param_group({**param_group, "params": params})


class AdamW(SweepOptimizer):
    """AdamW, or Adam with L2 regularization if `decoupled_weight_decay=False`."""

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
            raise SweepInputError("amsgrad", "is not supported; it would need a third moment")

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
    """SGD as in torch, with momentum, dampening, L2 regularization and Nesterov momentum."""

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
            raise SweepInputError("nesterov", "requires a momentum above 0 and a dampening of 0")

    def coefficients(self, group: dict[str, Any], step: int) -> Coefficients:
        return rules.sgd(
            step=step,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            # torch ignores dampening without momentum.
            dampening=group["dampening"] if self.keeps_moments(group) else 0.0,
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            scale=-1.0 if group["maximize"] else 1.0,
        )


class Lion(SweepOptimizer):
    """Lion (Chen et al., 2023): one moment, steps of equal size, 10 bytes per bf16 parameter."""

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
    """Raise SweepInputError unless both betas are at least 0 and below 1."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise SweepInputError("betas", f"must be two numbers, at least 0 and below 1, got {betas}")


def _grad(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def _check_param(name: str, param: torch.Tensor) -> None:
    if param.device.type != "cpu":
        raise SweepInputError(
            name, f"is on {param.device}; this optimizer only updates host tensors"
        )
    if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise SweepInputError(name, f"is {param.dtype}; it must be fp32, bf16 or fp16")
    if not param.is_contiguous():
        raise SweepInputError(
            name, f"is not contiguous (strides {param.stride()}); make it .contiguous()"
        )


def _check_grad(name: str, param: torch.Tensor) -> None:
    grad = _grad(param)
    if grad.is_sparse:
        raise SweepInputError(f"grad of {name}", "is sparse; only dense gradients are supported")
    if grad.shape != param.shape:
        raise SweepInputError(
            f"grad of {name}", f"has shape {tuple(grad.shape)}, expected {tuple(param.shape)}"
        )
