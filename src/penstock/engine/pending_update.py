"""An optimizer update that has been decided and not yet applied to every block.

`Engine.apply` fixes everything the update depends on: learning rates, clipping scale, step number.
The sweeps that apply it run block by block during the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.engine.spans import Span
from penstock.model.inventory import Inventory
from penstock.optim.rules import Coefficients, RuleName, draw_key
from penstock.optim.sweep import Constants, Part, Segment
from penstock.optim.tensor_rules import TensorUpdate
from penstock.plan.schedule import Operation
from penstock.roles import MOMENTS, WEIGHTS, Role
from penstock.ticket import Ticket

Swept = tuple[int, int | None]
"""A block, and a piece of it, or None for the whole block."""


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """One optimizer update, and which blocks it has reached."""

    rule: RuleName
    """The rule of all tensors that are updated element by element."""
    coefficients: Mapping[str, Coefficients]
    """Of those tensors, with the clipping scale included."""
    keys: Mapping[str, int]
    """Per tensor, the key of its stochastic rounding."""
    done: set[Swept] = field(default_factory=set)
    """Blocks and pieces whose sweep has been started. A step that fails waits for its sweeps, so
    after any step they have ended."""
    late: dict[Swept, list[Ticket[object]]] = field(default_factory=dict)
    """Blocks and pieces whose moments are still to be updated, each with the sweeps of its weights.
    A block that the GPU sweeps in pieces is here as a whole, so all pieces here have moments on
    NVMe. While a step runs, only the lanes that sweep it, or offload what was swept, touch an
    entry, and the second waits for the first."""
    whole: Mapping[str, TensorUpdate] = field(default_factory=dict)
    """Updates of the tensors that are updated as a whole."""
    updated: set[str] = field(default_factory=set)
    """Those of them whose update has been issued."""

    @property
    def has_late_pieces(self) -> bool:
        """Whether moments on NVMe are still to be updated: between steps, only after a failure."""
        return any(piece is not None for _, piece in self.late)

    def constants(self, segments: Iterable[Segment]) -> list[Constants]:
        """Return what segments are updated by, in their order."""
        return [(self.coefficients[s.name], self.keys[s.name]) for s in segments]

    def part_to_sweep(self, operation: Operation) -> Part | None:
        """Return what a sweep on the CPU has to update; None if earlier ones have done it.

        An earlier step may have failed between the sweep of the weights and that of the moments.
        """
        key = (operation.block, operation.piece)
        if operation.roles == MOMENTS or (key in self.done and operation.roles != WEIGHTS):
            return "moments" if key in self.late else None
        if key in self.done:
            return None
        return "weights" if operation.roles == WEIGHTS else "all"


def draw_keys(inventory: Inventory, seed: int, step: int) -> dict[str, int]:
    """Return each tensor's key for stochastic rounding in this step."""
    names = [t.name for block in inventory.blocks for t in block.tensors]
    return {name: draw_key(seed, step, i) for i, name in enumerate(names)}


def make_segments(
    inventory: Inventory, block: int, pending: PendingUpdate, roles: Mapping[Role, Span],
    start: int, stop: int,
) -> list[Segment]:  # fmt: skip
    """Return the sweep's segments for elements `start` to `stop` of a block's trainable buffer."""
    spec = inventory.blocks[block]
    segments = []
    for tensor in spec.tensors:
        if not tensor.trainable or tensor.name in pending.whole:
            continue
        offset = spec.offsets(True)[tensor.name]
        low, high = max(start, offset), min(stop, offset + tensor.elements)
        if low >= high:
            continue
        first, second = roles.get(Role.FIRST), roles.get(Role.SECOND)
        shift = spec.state_offset(Role.SECOND, tensor) - offset
        rest = roles.get(Role.MASTER)  # an fp32 weight is its own master weight
        segments.append(
            Segment(
                name=tensor.name,
                by=pending.coefficients[tensor.name],
                grad=roles[Role.GRADIENT].values(low, high),
                weight=roles[Role.WEIGHT].values(low, high),
                rest=rest.values(low, high) if rest else None,
                first=first.values(low, high) if first else None,
                second=second.values(low + shift, high + shift) if second else None,
                first_base=first.bases(low, high) if first else None,
                second_base=second.bases(low + shift, high + shift) if second else None,
                first_index=low - offset,
                key=pending.keys[tensor.name],
            )
        )
    return segments
