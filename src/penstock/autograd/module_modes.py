"""Settings of modules that a caller may change between calls, and the engine must follow.

The engine computes with a copy of the model. A caller who changes a dropout rate (as TRL does), or
switches PEFT's adapters off (as DPO's reference does), changes the modules of its own model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from penstock.errors import EngineError
from penstock.model.copy_check import has_dropout

FIELDS = ("_disable_adapters", "_active_adapter", "scaling")
"""Attributes of PEFT's layers that decide which adapters compute."""

NOT_COMPUTED = ("training", "gradient_checkpointing", "layer_idx")
"""Attributes that a caller may change, and that do not change what the engine computes."""

Modes = Sequence[tuple[Any, dict[str, Any]]]
"""Modules of the copy, and the attributes to set."""


class ModuleModes:
    """Pairs of a caller's modules and those of the engine's copy.

    `streamed` are the names of those that the engine computes with its copy alone.
    """

    def __init__(
        self, own: Iterable[tuple[str, nn.Module]], copied: Iterable[tuple[str, nn.Module]],
        streamed: Collection[str],
    ) -> None:  # fmt: skip
        named: dict[str, Any] = dict(own)
        self._streamed = [(n, m, _contents(m)) for n, m in named.items() if n in streamed]
        self._copied = [(n, m) for n, m in named.items() if _is_copied(m)]
        self._pairs = [
            (named[name], module, fields)
            for name, module in copied
            if name in named and (fields := _fields(module))
        ]

    def current(self, *, training: bool) -> Modes:
        """Return what the caller's modules are set to now.

        Raises EngineError if a module is switched off of which PEFT trains a copy, or if one was
        changed in a way that the copy does not follow. `training` is the mode of the whole model.
        """
        for name, module, before in self._streamed:
            _check_unchanged(name, module, before)
            if module.training != training and has_dropout(module):
                raise EngineError(
                    f"{name} has dropout and its training mode is {module.training}, but that of "
                    f"the model is {training}, and the engine computes all layers in the mode of "
                    f"the model. Set the rate of its dropout to 0 instead"
                )
        for name, module in self._copied:
            if module._disable_adapters:
                raise EngineError(
                    f"{name} is a copy that the adapter trains (modules_to_save), and the engine "
                    f"has not kept the original, so the adapter cannot be switched off. Leave out "
                    f"modules_to_save, or use a second streamed model as the reference"
                )
        return [
            (copied, {field: _copy(getattr(own, field)) for field in fields})
            for own, copied, fields in self._pairs
        ]


def apply_modes(modes: Modes) -> None:
    """Set the modules of the copy."""
    for module, values in modes:
        for name, value in values.items():
            if getattr(module, name) != value:
                setattr(module, name, _copy(value))


def _contents(module: nn.Module) -> dict[str, Any]:
    """Return numbers and texts of a module, and its buffers with how often they were changed."""
    fields = _fields(module)
    found: dict[str, Any] = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | bool | None)
        if not name.startswith("_") and name not in NOT_COMPUTED and name not in fields
    }
    for name, buffer in module._buffers.items():
        found[name] = None if buffer is None else (id(buffer), buffer._version)
    return found


def _check_unchanged(name: str, module: nn.Module, before: dict[str, Any]) -> None:
    """Raise EngineError if a module's numbers, texts or buffers were changed."""
    now = _contents(module)
    if now == before:
        return
    changed = next(key for key in {**before, **now} if before.get(key) != now.get(key))
    raise EngineError(
        f"{name}.{changed} was changed after penstock.stream, and the engine computes with a copy "
        f"of this module. Change it before penstock.stream, or close the model and stream it again"
    )


def _fields(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, nn.Dropout):
        return ("p",)
    return FIELDS if all(hasattr(module, field) for field in FIELDS) else ()


def _is_copied(module: Any) -> bool:
    """Return whether PEFT trains a copy of a module (`modules_to_save`)."""
    return hasattr(module, "original_module") and hasattr(module, "modules_to_save")


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
