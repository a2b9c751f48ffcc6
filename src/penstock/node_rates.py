"""What was measured of one memory node's speed. Room: measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import MachineError
from penstock.figures import Figure, check_at_least, check_one_of

MemoryOperation = Literal["read", "write", "copy", "sweep"]
SweepMoments = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRate:
    """How fast threads stream through one node's memory."""

    operation: MemoryOperation
    """A copy counts its bytes once, though each is read and written. A sweep is the optimizer's
    pass over parameters, moments and gradients, with every byte read or written counted."""

    threads: int = 1
    """Threads at work at once, on the CPUs nearest to the node."""

    moments: SweepMoments | None = None
    """Of a sweep: how the moments rest. Absent: in whatever way."""

    parameters: int | None = None
    """Of a sweep: how many are stepped in one pass. Absent: many."""

    bytes_per_second: Figure
    """All threads together."""

    def __post_init__(self) -> None:
        check_one_of(self, "operation", MemoryOperation)
        check_at_least(self, 1, "threads", "parameters")
        if self.moments is not None:
            check_one_of(self, "moments", SweepMoments)
        for name in ("moments", "parameters"):
            if getattr(self, name) is not None and self.operation != "sweep":
                raise MachineError(name, f'belongs to a "sweep", not to a "{self.operation}"')
