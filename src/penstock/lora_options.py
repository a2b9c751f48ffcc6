"""The options of a LoRA adapter, as `--lora` and run.yaml write them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import SettingsError

Bias = Literal["none", "all", "lora_only"]
Init = Literal["default", "gaussian"]

EXAMPLE = "r=16,alpha=32,targets=all-linear"

LARGEST_RANK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """What `--lora` says. The names in parentheses are those of `peft.LoraConfig`."""

    r: int = 16
    """Rank of the adapters (`r`)."""

    alpha: float | None = None
    """Factor of the adapters, divided by the rank (`lora_alpha`); None for twice the rank."""

    targets: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter, `all-linear`, or `none` (`target_modules`)."""

    parameters: tuple[str, ...] = ()
    """Parameters that get an adapter, such as `experts.down_proj` (`target_parameters`)."""

    exclude: tuple[str, ...] = ()
    """Modules that get none (`exclude_modules`)."""

    layers: tuple[int, ...] = ()
    """Layers that get adapters; empty for all (`layers_to_transform`)."""

    save: tuple[str, ...] = ()
    """Modules that are trained as a whole, such as `embed_tokens` (`modules_to_save`)."""

    dropout: float = 0.0
    """Dropout on the input of adapters (`lora_dropout`)."""

    bias: Bias = "none"
    """Which biases of the model are trained (`bias`)."""

    init: Init = "default"
    """How the adapters begin (`init_lora_weights`)."""

    rslora: bool = False
    """Whether to divide by the square root of the rank (`use_rslora`)."""

    @property
    def scale(self) -> float:
        """The factor of the adapters, before it is divided by the rank."""
        return 2.0 * self.r if self.alpha is None else self.alpha

    @classmethod
    def parse(cls, parts: Sequence[str]) -> LoraOptions:
        """Read options such as `r=16`, `targets=q_proj+v_proj` and `rslora`.

        Raises SettingsError.
        """
        values: dict[str, object] = {}
        for part in parts:
            name, sign, text = (piece.strip() for piece in part.partition("="))
            if name not in cls.__dataclass_fields__:
                _refuse(f"has no option {name!r}{_hint(name, cls)}")
            if name in values:
                _refuse(f"has the option {name} twice")
            if name == "rslora":
                values[name] = _flag(name, text if sign else "true")
            elif not sign or not text:
                _refuse(f"needs a value for {name}, as in {EXAMPLE}")
            else:
                values[name] = _VALUES[name](name, text)
        options = cls(**values)  # type: ignore[arg-type]
        if not 1 <= options.r <= LARGEST_RANK:
            _refuse(f"must have a rank r from 1 to {LARGEST_RANK}, got {options.r}")
        if not options.scale > 0:
            _refuse(f"must have an alpha above 0, got {options.scale:g}")
        if not 0 <= options.dropout < 1:
            _refuse(f"must have a dropout of at least 0 and below 1, got {options.dropout:g}")
        if "none" in options.targets and (len(options.targets) > 1 or not options.parameters):
            _refuse("with targets=none, needs the names of parameters in parameters=")
        if options.parameters and options.layers:
            _refuse("has layers=, which PEFT does not apply to parameters=; leave one of them out")
        if options.layers and options.targets == ("all-linear",):
            _refuse("with layers=, needs the names of modules in targets=, e.g. q_proj+v_proj")
        return options


def _refuse(problem: str) -> None:
    raise SettingsError("lora", problem)


def _hint(name: str, cls: type[LoraOptions]) -> str:
    names = list(cls.__dataclass_fields__)
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(names)}"


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        _refuse(f"has {name}={text}; write {name} to switch it on")
    return text.lower() == "true"


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        _refuse(f"must have a number for {name}, got {text!r:.40}")
    return value


def _whole(name: str, text: str) -> int:
    value = _number(name, text)
    if value != int(value):
        _refuse(f"must have a whole number for {name}, got {text!r:.40}")
    return int(value)


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split("+"))
    if not all(names):
        _refuse(f"must have names joined by + for {name}, got {text!r:.80}")
    return names


def _layers(name: str, text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split("+"):
        first, sign, last = part.partition("-")
        if not first.isdecimal() or (sign and not last.isdecimal()) or len(part) > 12:
            _refuse(f"must have numbers such as 0-3+7 for {name}, got {text!r:.40}")
        stop = int(last or first) + 1
        if stop <= int(first):  # no layer at all would mean every layer
            _refuse(f"must have ranges of {name} that count up, got {text!r:.40}")
        if stop - int(first) > LARGEST_RANK:
            _refuse(f"has too many {name}: {text!r:.40}")
        found += range(int(first), stop)
    return tuple(dict.fromkeys(found))


def _bias(name: str, text: str) -> str:
    return _choice(name, text, get_args(Bias))


def _init(name: str, text: str) -> str:
    return _choice(name, text, get_args(Init))


def _choice(name: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        _refuse(f"must have one of {', '.join(choices)} for {name}, got {text!r:.40}")
    return text


_VALUES = {
    "r": _whole, "alpha": _number, "dropout": _number, "bias": _bias, "init": _init,
    "layers": _layers, **dict.fromkeys(("targets", "parameters", "exclude", "save"), _names),
}  # fmt: skip
