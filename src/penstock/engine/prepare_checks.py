"""Refuse what `prepare` would not train as the caller expects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PlanError, SettingsError, UnsupportedModelError
from penstock.model.inventory import Inventory
from penstock.plan.budget import Budget
from penstock.plan.plan import Plan

if TYPE_CHECKING:
    from penstock.engine.loss import LossFunction
    from penstock.model.live_model import LiveModel


def check_live_model(live: LiveModel, inventory: Inventory, *, own_loss: bool) -> None:
    """Raise UnsupportedModelError if the engine would compute something else than the model.

    `own_loss` is set if the caller brings a loss in place of the model's.
    """
    _check_head(live)
    _check_outer_hooks(live, inventory)
    _check_modes(live)
    if not own_loss:
        _check_loss_function(live)


def check_arguments(model: object, budget: object, optimizer: object) -> None:
    """Raise an error for arguments of a wrong type, which a user may well pass."""
    if not isinstance(model, str | Path) and not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model, which has a config. Pass a model "
            f"of transformers or PEFT, the path of a model, or its ID on the Hub"
        )
    if budget is not None and not isinstance(budget, Budget | Mapping):
        raise PlanError(
            "budget",
            f"must name tiers, such as {{'hbm': '20GiB', 'dram': 'auto'}}, got {budget!r:.80}",
        )
    if optimizer is not None and not isinstance(optimizer, str | Mapping):
        raise SettingsError(
            "optimizer",
            f"must be a name, or a name with options such as {{'name': 'adamw', 'lr': 1e-5}}: the "
            f"engine has optimizers of its own, for parameters that are not in memory. Got "
            f"{type(optimizer).__name__}",
        )


def _check_head(live: LiveModel) -> None:
    """Raise UnsupportedModelError if a model has no head for the loss that the engine computes."""
    from penstock.model.output_weight import output_weight

    if output_weight(live.model) is None:
        raise UnsupportedModelError(
            f"{type(live.model).__name__} has no head that predicts tokens, and prepare() trains "
            f"with the loss of the next token. Use penstock.stream(model, ...) and compute the "
            f"loss from what the model returns"
        )


def _check_outer_hooks(live: LiveModel, inventory: Inventory) -> None:
    """Raise UnsupportedModelError if hooks on the whole model would see other calls than its own.

    The engine calls the module that owns the layers, and the whole model for chunks of tokens.
    """
    from penstock.model.copy_check import HOOKS

    base = inventory.layers[0].name.split(".")[:-2]
    for depth in range(len(base)):
        name = ".".join(base[:depth])
        module = live.model.get_submodule(name)
        if any(vars(module)[hooks] for hooks in HOOKS):
            raise UnsupportedModelError(
                f"{name or type(live.model).__name__} has hooks, and prepare() does not call it as "
                f"a whole: the engine computes the loss in chunks of tokens. Remove the hooks, put "
                f"them on the modules inside, or use penstock.stream"
            )


def _check_modes(live: LiveModel) -> None:
    """Raise UnsupportedModelError if some modules of a model in training mode have no dropout.

    A model that is in evaluation mode, as `from_pretrained` returns it, is trained as a whole.
    """
    from penstock.model.copy_check import has_dropout

    if not live.model.training:
        return
    for name, module in live.model.named_modules():
        if not module.training and has_dropout(module):
            raise UnsupportedModelError(
                f"{name} has dropout and is in evaluation mode, but the model is in training mode, "
                f"in which the engine computes all modules. Set the rate of its dropout to 0"
            )


def _check_loss_function(live: LiveModel) -> None:
    """Raise UnsupportedModelError if the caller has given a model another loss function.

    The model's class is checked with its twin, which does not have what was set on one model.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    given = vars(live.model).get("_loss_function")
    if given is not None and given is not LOSS_MAPPING["ForCausalLM"]:
        raise UnsupportedModelError(
            f"the loss_function of this {type(live.model).__name__} was set to "
            f"{getattr(given, '__name__', given)}, and prepare() trains with the cross-entropy of "
            f"the next token. Use penstock.stream(model, ...), which trains with any loss, or pass "
            f"prepare(..., loss=...)"
        )


def check_router_loss(config: Any) -> None:
    """Raise UnsupportedModelError if a caller's own loss would need the logits of routers."""
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "output_router_logits is on, but with a loss of your own the layers return hidden "
            "states only. Set it to false in the model's config, or let the engine compute the "
            "loss (penstock.prepare), which adds the auxiliary loss"
        )


def check_loss(plan: Plan, loss: LossFunction | None, arguments: Mapping[str, Any]) -> None:
    """Raise PlanError unless the plan's numerics compute the loss that the caller asks for."""
    numerics = plan.workload.numerics
    if loss is not None and numerics.loss_kernel == "fused":
        raise PlanError("loss_kernel", "is fused, which supports no custom loss function; plan "
                        "again with the function, or leave the function out")  # fmt: skip
    if loss is not None and numerics.label_smoothing:
        raise PlanError(
            "label_smoothing",
            f"is {numerics.label_smoothing}, which cannot be combined with a custom loss function: "
            f"the function gets the log-probabilities of the targets only; leave one of them out",
        )
    for name in ("label_smoothing", "neftune_noise_alpha", "quantize"):
        planned = getattr(numerics, name)
        wanted = arguments.get(name, planned)
        if (wanted or None) != (planned or None):
            raise PlanError(
                name,
                f"is {planned} in the plan and {wanted} in the arguments; make a new plan, or "
                f"leave the argument out",
            )
