"""Settings of modules that a caller may change between calls, and the engine must follow.

The engine computes with a copy of the model. A caller who changes a dropout rate (as TRL does), or
switches PEFT's adapters off (as DPO's reference does), changes the modules of its own model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from penstock.errors import EngineError

FIELDS = ("_disable_adapters", "_active_adapter", "scaling")
"""Attributes of PEFT's layers that decide which adapters compute."""

Modes = Sequence[tuple[Any, dict[str, Any]]]
"""Modules of the copy, and the attributes to set."""


class ModuleModes:
    """Pairs of a caller's modules and those of the engine's copy."""

    def __init__(
        self, own: Iterable[tuple[str, nn.Module]], copied: Iterable[tuple[str, nn.Module]]
    ) -> None:
        named: dict[str, Any] = dict(own)
        self._copied = [(n, m) for n, m in named.items() if _is_copied(m)]
        self._pairs = [
            (named[name], module, fields)
            for name, module in copied
            if name in named and (fields := _fields(module))
        ]

    def current(self) -> Modes:
        """Return what the caller's modules are set to now.

        Raises EngineError if a module is switched off of which PEFT trains a copy.
        """
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


def _fields(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, nn.Dropout):
        return ("p",)
    return FIELDS if all(hasattr(module, field) for field in FIELDS) else ()


def _is_copied(module: Any) -> bool:
    """Return whether PEFT trains a copy of a module (`modules_to_save`)."""
    return hasattr(module, "original_module") and hasattr(module, "modules_to_save")


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
