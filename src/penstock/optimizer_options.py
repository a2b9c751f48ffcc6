"""The optimizers that the engine trains with, and the options of each.

The names of options are those of `torch.optim`. A plan depends on the optimizer's name and on
whether SGD has momentum, because these decide how many bytes a parameter needs. All other options
belong to parameter groups: they may differ between groups, and a learning-rate scheduler may change
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from penstock.errors import SettingsError
from penstock.roles import OptimizerName

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)

TITLES: Mapping[OptimizerName, str] = {
    "adamw": "AdamW",
    "lion": "Lion",
    "sgd": "SGD",
    "adafactor": "Adafactor",
    "muon": "Muon",
}
"""How sentences spell each optimizer."""

WHOLE_TENSOR: tuple[OptimizerName, ...] = ("adafactor", "muon")
"""Optimizers that need all elements of a tensor to update any of them. The others update every
element by itself."""

UPDATE_CHUNK = 1 << 21
"""Number of elements of a tensor that such an optimizer processes at a time. Adafactor's sums
depend on it, so a change would change results."""

ADJUST_LR = ("match_rms_adamw", "original")
"""Values of Muon's `adjust_lr_fn`, as in `torch.optim.Muon`."""

_ADAMW: Mapping[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

DEFAULTS: Mapping[OptimizerName, Mapping[str, Any]] = {
    "adamw": _ADAMW,
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.1},
    "sgd": {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.1},
    "adafactor": {"beta2_decay": -0.8, "eps": (2.0**-23, 1e-3), "d": 1.0, "weight_decay": 0.1},
    # With this `adjust_lr_fn`, one learning rate suits the matrices and what AdamW updates.
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr_fn": "match_rms_adamw",
        **_ADAMW,
    },
}
"""Default of each option of each optimizer but the learning rate, which is a setting of the run."""


def option_names(name: OptimizerName) -> tuple[str, ...]:
    """Return the names of an optimizer's options."""
    return ("lr", *DEFAULTS[name])


def check_known(name: OptimizerName, options: Iterable[str]) -> None:
    """Raise SettingsError unless the optimizer has all of these options."""
    known = option_names(name)
    for option in options:
        if option not in known:
            users = [each for each in NAMES if option in option_names(each)]
            has = f"is an option of {' and '.join(users)}, not of" if users else "is no option of"
            raise SettingsError(option, f"{has} {name}, whose options are {', '.join(known)}")


def check_values(name: OptimizerName, options: Mapping[str, Any]) -> None:
    """Raise SettingsError unless the values of a complete set of options are allowed."""
    for option in ("lr", "weight_decay"):
        _require(option, options[option], _is_number(options[option]), "must be 0 or more")
    if "betas" in options:
        rule = "must be two numbers of at least 0 and below 1"
        _require("betas", options["betas"], _are_betas(options["betas"]), rule)
    match name:
        case "adamw":
            _require("eps", options["eps"], _is_number(options["eps"]), "must be 0 or more")
        case "sgd":
            _check_sgd(options)
        case "adafactor":
            _check_adafactor(options)
        case "muon":
            _check_muon(options)


def _check_sgd(options: Mapping[str, Any]) -> None:
    momentum, nesterov = options["momentum"], options["nesterov"]
    _require("momentum", momentum, _is_number(momentum), "must be 0 or more")
    allowed = not nesterov or (momentum > 0 and options["dampening"] == 0)
    _require("nesterov", nesterov, allowed, "needs a momentum above 0 and a dampening of 0")


def _check_adafactor(options: Mapping[str, Any]) -> None:
    eps, d, decay = options["eps"], options["d"], options["beta2_decay"]
    pair = isinstance(eps, Sequence) and len(eps) == 2 and all(map(_is_number, eps))
    _require("eps", eps, pair, "must be two numbers of 0 or more")
    _require("d", d, _is_number(d) and d >= 1, "must be 1 or more")
    _require("beta2_decay", decay, _is_number(-decay), "must be 0 or less")


def _check_muon(options: Mapping[str, Any]) -> None:
    momentum, steps, adjust = (options[n] for n in ("momentum", "ns_steps", "adjust_lr_fn"))
    _require("eps", options["eps"], _is_number(options["eps"]), "must be 0 or more")
    below_one = _is_number(momentum) and momentum < 1
    _require("momentum", momentum, below_one, "must be at least 0 and below 1")
    whole = isinstance(steps, int) and 1 <= steps < 100
    _require("ns_steps", steps, whole, "must be a whole number from 1 to 99")
    _require("adjust_lr_fn", adjust, adjust in ADJUST_LR, f"must be {' or '.join(ADJUST_LR)}")


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number of 0 or more; a tensor with one element is, too."""
    return not isinstance(value, str) and 0 <= float(value) < float("inf")


def _are_betas(betas: Any) -> bool:
    return isinstance(betas, Sequence) and len(betas) == 2 and all(0 <= b < 1 for b in betas)


def _require(option: str, value: object, allowed: bool, rule: str) -> None:
    if not allowed:
        raise SettingsError(option, f"{rule}, got {value}")
