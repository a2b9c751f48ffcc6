"""Which layers of a model compute alike. Room: names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def layer_kinds(layers: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """Equal for layers that compute alike: code that was compiled for one does for the others."""
    return [_kind(layer) for layer in layers]


def firsts(kinds: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], int]:
    """The number of the first layer of each kind."""
    return {kind: index for index, kind in reversed(list(enumerate(kinds)))}


def raise_recompile_limit() -> None:
    """Functions that stand for many layers share one piece of code, of which torch would compile
    only a few forms: with and without gradients, for each kind and shape."""
    import torch

    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 64)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers compute alike: everything that their modules hold but their number."""
    plain = (int, float, str, bool, type(None))
    found: list[Any] = [repr(layer)]
    for path, module in layer.named_modules():
        kept = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, plain) and name not in ("layer_idx", "training")
        }
        found.append((path, tuple(sorted(kept.items()))))
    return tuple(found)
