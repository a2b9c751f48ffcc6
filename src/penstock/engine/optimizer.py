"""The optimizer that users and learning-rate schedulers see.

Its parameters have names and shapes but no memory: the values live in tiers and are read through
`engine.state`. `step` asks the engine to apply the update; the arithmetic is in `penstock.optim`
(`optim/rules.py` computes the coefficients, `optim/sweep.py` applies them).
`docs/sweep.md` (Add an optimizer) lists the steps for a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.engine.state_view import StateView
from penstock.errors import EngineError, SettingsError, SweepInputError
from penstock.model.inventory import Inventory, is_muon_matrix
from penstock.optim import rules
from penstock.optim.rules import Coefficients, RuleName
from penstock.optim.tensor_rules import AdafactorUpdate, MuonUpdate, TensorUpdate
from penstock.optimizer_options import DEFAULTS, WHOLE_TENSOR, check_known, check_values
from penstock.plan.workload import Workload
from penstock.roles import OptimizerName
from penstock.settings import ScheduleSettings

Grouping = Callable[[Iterable[tuple[str, nn.Parameter]]], Sequence[dict[str, Any]]]
"""Makes param groups, in the form torch's optimizers take, from named parameters."""


NOT_COMPUTED = ("maximize", "amsgrad", "differentiable")
"""Options of torch's optimizers that change the update, and that Penstock does not have."""


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
    workload: Workload
    steps: int
    skipped: bool

    @property
    def state(self) -> StateView: ...

    def apply(self) -> None: ...


class StreamedOptimizer(torch.optim.Optimizer):
    """An optimizer over tiers. `step` fixes the update; the sweeps that apply it run later."""

    def __init__(
        self,
        engine: Updates,
        settings: Mapping[str, Any],
        grouping: Grouping,
        named: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.kind: OptimizerName = engine.workload.optimizer
        """Name of the optimizer."""
        check_known(self.kind, settings)
        defaults = {"lr": ScheduleSettings().lr, **DEFAULTS[self.kind], **settings}
        named = named or {
            t.name: nn.Parameter(torch.empty(t.shape, device="meta"))
            for block in engine.inventory.blocks
            for t in block.tensors
            if t.trainable
        }
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._engine = engine
        self._whole = whole_tensors(engine.inventory, self.kind)
        groups = [g for g in grouping(named.items()) if list(g["params"])]
        super().__init__(groups, defaults)
        self._check_all_grouped(named)
        for group in self.param_groups:
            check_values(self.kind, group)
        self._check_momentum()

    def _check_all_grouped(self, named: Mapping[str, nn.Parameter]) -> None:
        grouped = {id(p) for group in self.param_groups for p in group["params"]}
        for name, parameter in named.items():
            if id(parameter) not in grouped:
                raise SweepInputError(
                    name, "is in no param group; add it to a group, or freeze the parameter"
                )

    def _check_momentum(self) -> None:
        """Raise SettingsError unless the plan has memory for SGD's momentum if there is one."""
        stored = self._engine.workload.momentum
        largest = max((group.get("momentum", 0.0) for group in self.param_groups), default=0.0)
        if self.kind == "sgd" and stored != (largest > 0):
            has, hint = "memory", "set a momentum, or make a plan without one"
            if not stored:
                has, hint = "no memory", "set one for the whole run, and 0 in groups without it"
            raise SettingsError("momentum", f"is {largest}, but the plan has {has} for it; {hint}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; EngineError for parameters of other modules."""
        super().add_param_group(param_group)  # it also makes a list of what may be an iterator
        foreign = [p for p in self.param_groups[-1]["params"] if id(p) not in self._names]
        if foreign:
            self.param_groups.pop()
            raise EngineError(
                f"a tensor of shape {tuple(foreign[0].shape)} is not a trained parameter of the "
                f"model that this optimizer updates. Use a second optimizer for your own modules, "
                f"such as torch.optim.AdamW(module.parameters()), and call step() and zero_grad() "
                f"of both"
            )

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    @property
    def rule(self) -> RuleName:
        """The rule of tensors that are updated element by element."""
        return element_rule(self.kind)

    def coefficients(
        self, step: int, scale: float, tensor_scales: Mapping[str, float] | None = None
    ) -> dict[str, Coefficients]:
        """Return the coefficients for step number `step`, of tensors updated element by element.

        `scale` multiplies all gradients, and `tensor_scales` those of single tensors in addition.
        They are copies: later changes to the param groups do not affect a pending update.
        """
        scales = tensor_scales or {}
        known: dict[tuple[int, float], Coefficients] = {}  # most tensors of a group share theirs
        found = {}
        for name, group in self._grouped(whole=False):
            factor = scale * scales.get(name, 1.0)
            key = (id(group), factor)
            if key not in known:
                known[key] = _coefficients(self.rule, group, step, factor)
            found[name] = known[key]
        return found

    def whole_updates(
        self, step: int, scale: float, tensor_scales: Mapping[str, float] | None = None
    ) -> dict[str, TensorUpdate]:
        """Return the updates for step number `step`, of tensors that are updated as a whole."""
        scales = tensor_scales or {}
        return {
            name: _whole_update(self.kind, group, step, scale * scales.get(name, 1.0))
            for name, group in self._grouped(whole=True)
        }

    def _grouped(self, *, whole: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the names of tensors, and the param group of each.

        Raises SettingsError if a group has an option of torch's optimizers that would be ignored.
        """
        for group in self.param_groups:
            for option in NOT_COMPUTED:
                if group.get(option):
                    raise SettingsError(option, "of a param group is not supported; leave it out")
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                if (name in self._whole) == whole:
                    yield name, group

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
        """Return the state in the form of torch's optimizer of that name, in fp32 on the host.

        Each moment needs 4 bytes of host memory per parameter. To save a checkpoint, use
        `engine.write`, which needs no such memory.
        """
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = self._engine.state
        for number, parameter in enumerate(parameters):
            moments = state.moments(self.name_of(parameter))
            packed["state"][number] = {"step": torch.tensor(float(self._engine.steps)), **moments}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class, or of torch's optimizer over the same parameters.

        The state of torch's SGD and Muon does not say how many steps were made: it counts as one.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        states = state_dict["state"]
        if not states:
            return
        named = {self.name_of(p): states[number] for number, p in enumerate(parameters)}
        self._engine.state.write_moments(named)
        self._engine.steps = int(next(iter(named.values())).get("step", 1))

    def note_step(self) -> None:
        """Record that a step was made: LR schedulers warn if they are called before the first."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `step` consumes the gradients."""


def element_rule(kind: OptimizerName) -> RuleName:
    """Return the rule of an optimizer for tensors that it updates element by element.

    Muon updates all but matrices with AdamW. An optimizer without a rule is an error: AdamW in its
    place would train, and differently.
    """
    match kind:
        case "adafactor" | "muon":
            return "adamw"
        case "adamw" | "lion" | "sgd":
            return kind
    raise ValueError(f"the optimizer {kind} has no rule for single elements")


def whole_tensors(inventory: Inventory, kind: OptimizerName) -> frozenset[str]:
    """Return the names of tensors that an optimizer updates as a whole."""
    if kind not in WHOLE_TENSOR:
        return frozenset()
    return frozenset(
        tensor.name
        for block in inventory.blocks
        for tensor in block.tensors
        if tensor.trainable and (kind != "muon" or is_muon_matrix(block, tensor))
    )


def _whole_update(
    kind: OptimizerName, group: Mapping[str, Any], step: int, scale: float
) -> TensorUpdate:
    """Return the update of a tensor as a whole, from the options of its param group."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    if kind == "muon":
        return MuonUpdate(
            scale=scale, lr=lr, weight_decay=decay, momentum=group["momentum"],
            nesterov=group["nesterov"], ns_steps=group["ns_steps"],
            adjust_lr_fn=group["adjust_lr_fn"],
        )  # fmt: skip
    return AdafactorUpdate(
        scale=scale, step=step, lr=lr, weight_decay=decay, beta2_decay=group["beta2_decay"],
        eps=group["eps"], d=group["d"],
    )  # fmt: skip


def _coefficients(
    kind: RuleName, group: Mapping[str, Any], step: int, scale: float
) -> Coefficients:
    """Return the coefficients of a param group for one step."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    match kind:
        case "adamw":
            return rules.adamw(
                step=step, lr=lr, betas=group["betas"], eps=group["eps"], weight_decay=decay,
                scale=scale,
            )  # fmt: skip
        case "lion":
            return rules.lion(lr=lr, betas=group["betas"], weight_decay=decay, scale=scale)
        case "sgd":
            momentum = group["momentum"]
            return rules.sgd(
                # torch ignores dampening without momentum.
                step=step, lr=lr, momentum=momentum, weight_decay=decay,
                dampening=group["dampening"] if momentum else 0.0,
                nesterov=group["nesterov"], scale=scale,
            )  # fmt: skip
