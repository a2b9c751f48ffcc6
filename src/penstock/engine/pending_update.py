"""What a pending sweep needs, fixed when the step was asked for. Room: move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engine.spans import Span
from penstock.model.inventory import Inventory
from penstock.optim.rules import Coefficients, RuleName, draw_key
from penstock.optim.sweep import Segment
from penstock.roles import Role


@dataclass(frozen=True, slots=True)
class Pending:
    """One optimizer step that is still to be made, block by block."""

    rule: RuleName
    coefficients: Mapping[str, Coefficients]
    """Per tensor, with the clip scale in them."""
    keys: Mapping[str, int]
    """Per tensor: what stochastic rounding depends on."""
    done: set[tuple[int, int | None]] = field(default_factory=set)
    """Blocks and pieces already swept."""


def draw_keys(inventory: Inventory, seed: int, step: int) -> dict[str, int]:
    names = [t.name for block in inventory.blocks for t in block.tensors]
    return {name: draw_key(seed, step, i) for i, name in enumerate(names)}


def segments(
    inventory: Inventory, block: int, pending: Pending, roles: Mapping[Role, Span],
    start: int, stop: int,
) -> list[Segment]:  # fmt: skip
    """The runs of the block's tensors between two elements of its trainable buffer."""
    model = inventory.blocks[block]
    made = []
    for tensor in model.tensors:
        if not tensor.trainable:
            continue
        at = model.offsets(True)[tensor.name]
        low, high = max(start, at), min(stop, at + tensor.elements)
        if low >= high:
            continue
        first, second = roles.get(Role.FIRST), roles.get(Role.SECOND)
        made.append(
            Segment(
                name=tensor.name,
                by=pending.coefficients[tensor.name],
                grad=roles[Role.GRADIENT].values(low, high),
                weight=roles[Role.WEIGHT].values(low, high),
                rest=roles[Role.MASTER].values(low, high),
                first=first.values(low, high) if first else None,
                second=second.values(low, high) if second else None,
                first_base=first.bases(low, high) if first else None,
                second_base=second.bases(low, high) if second else None,
                first_index=low - at,
                key=pending.keys[tensor.name],
            )
        )
    return made
