"""Check the patterns of tensors that are not trained."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from penstock.errors import SettingsError
from penstock.model.inventory import Inventory


def check_freeze(inventory: Inventory, patterns: Sequence[str]) -> None:
    """Raise SettingsError if a pattern matches no tensor, or if none is left to train."""
    tensors = [tensor for block in inventory.blocks for tensor in block.tensors]
    names = [tensor.name for tensor in tensors]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SettingsError("freeze", f"{pattern!r} matches no tensor; {_hint(names, pattern)}")
    if not any(tensor.trainable for tensor in tensors):
        raise SettingsError(
            "freeze",
            f"leaves nothing to train: all {len(tensors)} tensors are frozen, by a pattern or by "
            f"requires_grad=False",
        )


def _hint(names: Sequence[str], pattern: str) -> str:
    inside = fnmatch.filter(names, f"*{pattern}*")
    if inside:  # a module, or a name without its beginning
        more = f" and {len(inside) - 1} more" if len(inside) > 1 else ""
        return f"`*{pattern}*` matches {inside[0]}{more}"
    close = difflib.get_close_matches(pattern.strip("*."), names, 3, cutoff=0.3) or names[:3]
    return (
        f"the model has {len(names)} tensors, such as {', '.join(close)}. A tied head has the name "
        f"of the embedding"
    )
