"""The order of one optimizer step, as data. Room: decide.

A pure function yields the operations; the engine carries them out, the cost model times them, and
`explain` and the tests read the same list. Two operations run in the order listed if they share a
lane (one stream of work, such as the copies into HBM) or if the later one names the earlier in
`after`; otherwise they may overlap. Sweeps on the CPU begin in that order, and the next may begin
before the last has ended: what needs one ended names it.

The step begins where the last gradient of the step before has left the GPU. So the sweep of a block
comes just before its forward, which is exact with clipping and hides behind compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from penstock.roles import Role

Phase = Literal["forward", "backward"]


class Verb(StrEnum):
    """What is done."""

    READ = "read"
    """From NVMe into host staging."""

    SWEEP = "sweep"
    """The optimizer's pass over a block, or over a piece of it."""

    WRITE = "write"
    """From host staging to NVMe."""

    RELEASE = "release"
    """Host staging is free again."""

    FETCH = "fetch"
    """Into HBM."""

    FORWARD = "forward"
    """All micro-batches of the round."""

    LOSS = "loss"
    """The head, forward and backward at once, so that logits live for one chunk only."""

    BACKWARD = "backward"
    """Recompute from the block's input, then differentiate, all micro-batches of the round."""

    DRAIN = "drain"
    """Out of HBM: gradients, and inputs that backward will need. To NVMe they go through the host
    in small pieces, as one operation, and so they come back."""

    DROP = "drop"
    """HBM is free again."""


COMPUTE = (Verb.FORWARD, Verb.LOSS, Verb.BACKWARD)


class Operation(NamedTuple):
    """One thing done. Its number is its place in the schedule."""

    verb: Verb
    """What is done."""

    block: int
    """To which block, by its place in the row."""

    roles: tuple[Role, ...]
    """To which of its roles."""

    phase: Phase
    """In which half of the step."""

    round: int = 0
    """In which round."""

    piece: int | None = None
    """Which piece of the block, where it passes through staging: those that are swept come first,
    then those of frozen weights."""

    gpu: bool = False
    """A sweep that the GPU does, over states that rest in HBM."""

    after: tuple[int, ...] = ()
    """Operations that must have ended."""

    @property
    def lane(self) -> str:
        """Operations of one lane begin in the order listed, and but for sweeps each after the one
        before has ended; "" for instant."""
        match self.verb:
            case Verb.FETCH:
                return "fetch inputs" if Role.INPUT in self.roles else "fetch"
            case Verb.DRAIN:
                return "drain inputs" if Role.INPUT in self.roles else "drain"
            case Verb.RELEASE | Verb.DROP:
                return ""
            case Verb.READ | Verb.WRITE:
                return str(self.verb)
            case Verb.SWEEP if not self.gpu:
                return "sweep"
            case _:
                return "compute"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of one step, in the order they are issued."""

    operations: tuple[Operation, ...]
    """Each refers only to earlier ones."""

    def __post_init__(self) -> None:
        for i, operation in enumerate(self.operations):
            assert all(0 <= j < i for j in operation.after), (i, operation)
