"""Choose the engine's optimizer from the arguments of a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from penstock import optim
from penstock.errors import SettingsError
from penstock.integrations.config import PenstockConfig
from penstock.optimizer_options import NAMES, option_names
from penstock.roles import OptimizerName

OPTIM: Mapping[str, OptimizerName] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
}
"""Values of `optim` that mean the same as an optimizer of the engine."""

CLASSES: Mapping[type, OptimizerName] = {
    torch.optim.AdamW: "adamw",
    torch.optim.SGD: "sgd",
    torch.optim.Adafactor: "adafactor",
    optim.AdamW: "adamw",
    optim.SGD: "sgd",
    optim.Lion: "lion",
}
"""Classes of optimizers that mean the same as an optimizer of the engine."""

HARMLESS = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's optimizers that say how they compute, and not what."""

HINT = (
    f"set optim to {', '.join(OPTIM)}, or pass PenstockConfig(optimizer=...) with one of "
    f"{', '.join(NAMES)}"
)


def check_optimizer(
    config: PenstockConfig, args: Any, chosen: tuple[Any, Mapping[str, Any]] | None
) -> None:
    """Raise SettingsError for an optimizer that the engine does not have.

    Before transformers asks for the packages of the optimizer.
    """
    if config.optimizer is not None:
        _named(config.optimizer)
    elif chosen is not None:
        _options_of_class(*chosen)
    elif args is not None:
        _name_of_optim(args)


def chooses_optimizer(trainer_class: type) -> bool:
    """Return whether a trainer's class says itself which optimizer it wants."""
    own = transformers.Trainer.get_optimizer_cls_and_kwargs
    return getattr(trainer_class, "get_optimizer_cls_and_kwargs", own) is not own


def optimizer_options(trainer: Any) -> dict[str, Any]:
    """Return the name and the options of the optimizer that a trainer's arguments ask for."""
    config, args, chosen = trainer.penstock, trainer.args, trainer.optimizer_cls_and_kwargs
    common = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if config.optimizer is not None:
        name, options = _named(config.optimizer)
        # The arguments for Adam are those of AdamW, also where Muon uses it.
        return {"name": name, **common, **(adam if name in ("adamw", "muon") else {}), **options}
    if chosen is None and not chooses_optimizer(type(trainer)):
        name = _name_of_optim(args)
        if name == "lion":
            # transformers would ask for bitsandbytes, and pass the betas of Adam.
            return {"name": name, **common, "betas": adam["betas"]}
    kind, given = chosen or trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    # Trainer passes weight_decay with the groups of parameters, where that of the class has no
    # effect.
    return _options_of_class(kind, given) | {"weight_decay": args.weight_decay}


def _named(given: OptimizerName | Mapping[str, Any]) -> tuple[OptimizerName, dict[str, Any]]:
    """Return the name and the options in `PenstockConfig.optimizer`."""
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if name not in NAMES:
        raise SettingsError("optimizer", f"must be one of {', '.join(NAMES)}, got {name}")
    return name, options


def _name_of_optim(args: Any) -> OptimizerName:
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIM:
        why = "; for moments of 8 bits, pass PenstockConfig(moments='int8')"
        if name == "adafactor":
            why = "; it is not the Adafactor of torch, which PenstockConfig(optimizer=...) has"
        elif "8bit" not in name:
            why = ""
        raise SettingsError("optim", f"is {name}, which Penstock does not have: {HINT}{why}")
    return OPTIM[name]


def _options_of_class(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name and the options that the engine takes, from those of a torch optimizer."""
    if kind not in CLASSES:
        name = getattr(kind, "__name__", str(kind))
        raise SettingsError("optimizer_cls_and_kwargs", f"has {name}: {HINT}")
    known = option_names(CLASSES[kind])
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    unknown = [
        name
        for name, value in given.items()
        if name not in (*known, *HARMLESS)
        and (value != defaults[name] if name in defaults else value)
    ]
    if unknown:
        raise SettingsError(
            "optimizer_cls_and_kwargs",
            f"has {', '.join(unknown)}; Penstock's {CLASSES[kind]} takes {', '.join(known)}",
        )
    # The defaults of Penstock's own optimizers are others than those of the class.
    options = {name: value for name, value in (defaults | dict(given)).items() if name in known}
    return {"name": CLASSES[kind], **{name: _value(value) for name, value in options.items()}}


def _value(option: Any) -> Any:
    """Return an option as the engine takes it."""
    if isinstance(option, torch.Tensor):
        return option.item()  # torch takes a learning rate in a tensor
    if isinstance(option, tuple | list):
        # The first epsilon of Adafactor is by default that of fp32.
        return tuple(torch.finfo(torch.float32).eps if x is None else x for x in option)
    return option
