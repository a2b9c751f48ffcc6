"""Find the longest sequence that a trainer will pass, which memory is planned for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import SettingsError
from penstock.units import round_up

logger = logging.getLogger(__name__)

GRAIN = 64
"""A length that is found in the data is rounded up to a multiple of this, or to the model's limit,
so that runs on similar data have the same numerics."""

HOW = "pass PenstockConfig(context=...) with the longest sequence in tokens"


def sequence_length(
    context: int | None, args: Any, datasets: Iterable[Any], *, limit: int | None
) -> tuple[int, str]:
    """Return the length to plan for, and where it comes from.

    Args:
        context: The user's own choice, which comes first.
        args: The trainer's arguments. `max_length` of SFTConfig truncates the data.
        datasets: Training and evaluation data.
        limit: Number of positions of the model, if it has a limit.
    """
    if context is not None:
        return context, "PenstockConfig.context"
    longest = getattr(args, "max_length", None)
    prepared = not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    if longest is not None and prepared:
        return min(longest, limit or longest), "max_length"
    found = max((_longest(data) for data in datasets), default=0)
    if found < 2:
        raise SettingsError("context", f"cannot be found in the data; {HOW}")
    rounded = round_up(found, GRAIN)
    length = max(found, rounded if limit is None else min(rounded, limit))
    return length, f"the longest sequence of the data, {found} tokens"


def _longest(data: Any) -> int:
    """Return the number of tokens of the longest example."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise SettingsError(
            "context", f"cannot be found in a {type(data).__name__}, which is read only once; {HOW}"
        )
    column_names = getattr(data, "column_names", None)
    if isinstance(column_names, list) and "input_ids" in column_names:
        # Only this column of a table is read.
        return max(map(_tokens, data.select_columns(["input_ids"])), default=0)
    return max((_tokens(data[index]) for index in range(len(data))), default=0)


def _tokens(example: Any) -> int:
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    if ids is None:
        raise SettingsError("context", f"cannot be found: examples have no input_ids; {HOW}")
    return int(ids.shape[-1]) if hasattr(ids, "shape") else len(ids)
