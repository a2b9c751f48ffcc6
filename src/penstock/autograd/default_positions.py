"""Find out which positions a model gives tokens behind padding if it gets no `position_ids`.

Most models count all tokens of a row, padding included. Some, such as OPT, count the tokens that
the attention mask shows. Values of weights do not tell them apart, because they are in the tiers of
the engine. What the model looks up in its tables does, and so do the arguments of its layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.errors import UnsupportedModelError
from penstock.model.layer_probe import Arguments

TOKENS, PADDING = 7, 3

Run = Callable[..., tuple[torch.Tensor, list[Arguments]]]
"""Runs what is before the layers, with arguments of the model; `LayerProbes.enter`."""

Positions = Callable[[torch.Tensor], torch.Tensor]
"""Makes positions from an attention mask."""

_aten = torch.ops.aten

LOOKUPS = (_aten.embedding, _aten.index_select, _aten.index, _aten.gather)


def find_positions(run: Run, name: str, device: torch.device) -> Positions:
    """Return how a model makes positions for rows with padding on the left.

    Raises UnsupportedModelError if that is not known. `name` is the model's, for this message.
    """
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            found = _find(run, device)
        problem = "they are neither those of the row nor those of the mask"
    except Exception as error:  # the model's own code may raise any exception
        found, problem = None, f"its code fails: {type(error).__name__}: {error}"
    if found is None:
        raise UnsupportedModelError(
            f"cannot find out which positions {name} gives tokens behind padding, because "
            f"{problem}. Pass position_ids, or pad on the right"
        )
    return found


def _find(run: Run, device: torch.device) -> Positions | None:
    mask = torch.ones(1, TOKENS, dtype=torch.int64, device=device)
    mask[:, :PADDING] = 0
    own = _uses(run, mask, None)
    for positions in CHOICES:
        tried = _uses(run, mask, positions(mask))
        if _same(own, tried):
            return positions
        if positions is not count_all and not _same(_shown(own), _shown(tried)):
            break  # negative positions of a model that does not have them crash a GPU
    return None


def count_all(mask: torch.Tensor) -> torch.Tensor:
    """Count all tokens of a row, padding included."""
    return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)


def count_shown(mask: torch.Tensor, padding: int) -> torch.Tensor:
    """Count tokens without padding, which has the given position."""
    return (mask.long().cumsum(1) - 1).masked_fill(mask == 0, padding)


CHOICES: tuple[Positions, ...] = (
    count_all,
    functools.partial(count_shown, padding=1),
    functools.partial(count_shown, padding=0),
    functools.partial(count_shown, padding=-1),
)


def _uses(run: Run, mask: torch.Tensor, positions: torch.Tensor | None) -> list[torch.Tensor]:
    """Return all that may depend on positions."""
    ids = torch.zeros_like(mask)
    with _Lookups() as lookups, torch.no_grad():
        _, calls = run(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        )  # fmt: skip
    found = [*lookups.indices, *tree_leaves([list(call) for call in calls])]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _shown(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out padding."""
    return [
        t.narrow(t.shape.index(TOKENS), PADDING, TOKENS - PADDING) if TOKENS in t.shape else t
        for t in found
    ]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(one, two) for one, two in pairs)


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which rows of tables are looked up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.indices: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in LOOKUPS:
            leaves = tree_leaves(list(args[1:]))
            self.indices += [v.clone() for v in leaves if isinstance(v, torch.Tensor)]
        return func(*args, **(kwargs or {}))
