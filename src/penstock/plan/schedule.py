"""The schedule of one optimizer step, as data.

A pure function builds the list of operations (see `build_schedule`). The engine executes it, the
cost model times it, and `penstock plan --explain` and the tests read it.

Ordering: two operations run in the listed order if they share a lane (one stream of work, such as
the copies into HBM), or if the later one names the earlier in `after`. Otherwise they may overlap.
CPU sweeps are the exception: they start in the listed order, but the next may start before the
previous one has ended, so whatever needs a sweep to have ended must name it.

A step starts when the last gradient of the previous step has left the GPU. A block's optimizer
sweep therefore runs just before the block's forward. That is exact even with clipping, which needs
the norm of all gradients, and it hides the sweep behind compute. Sweeps over host memory may run
earlier, between the pieces of a block on NVMe (`Placement.sweeps_interleaved`).

A sweep on the CPU may be divided in two: the weights before the block's forward, and the moments
before its backward replaces the gradient (`BlockPlacement.late_moments`). The first part reads and
writes 18 bytes per parameter instead of 26 with fp32 moments, at the time when compute waits for
sweeps. The second one runs while host memory is mostly idle. If the GPU makes the first part, it
computes both, and the moments are not offloaded. If the moments are on NVMe, the first part reads
them and does not write them back; the second one reads them again, at a time when the disk has
little else to do.

Several ranks run one list. Each of them fetches and sweeps its own shard of a block, and computes
its own micro-batches. Weights are gathered before a block computes, and gradients are exchanged
after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from penstock.roles import Role

Phase = Literal["forward", "backward"]


class Verb(StrEnum):
    """What an operation does."""

    READ = "read"
    """Read from NVMe into host staging."""

    SWEEP = "sweep"
    """Run the optimizer over a block, or over a piece of it. The roles are `TRAINED`, or what the
    CPU updates: `WEIGHTS` or `MOMENTS`."""

    WRITE = "write"
    """Write from host staging to NVMe."""

    RELEASE = "release"
    """Mark a host staging buffer as free."""

    FETCH = "fetch"
    """Copy into HBM."""

    FORWARD = "forward"
    """Run forward on all micro-batches of the round."""

    LOSS = "loss"
    """Run the head forward and backward in one operation, so that only one chunk's logits exist."""

    BACKWARD = "backward"
    """Recompute from the block's activation, without attention where its results were saved, then
    run backward, on all micro-batches of the round."""

    OFFLOAD = "drain"  # the value is in recorded timelines and events
    """Offload from HBM: gradients, and activations and results of attention that backward needs. On
    the way to NVMe they pass through host memory in small pieces within this one operation. FETCH
    is its inverse."""

    DROP = "drop"
    """Mark a buffer in HBM as free."""

    GATHER = "gather"
    """Complete a block's weights in HBM with the shards of the other ranks."""

    EXCHANGE = "exchange"
    """Send every rank its shard of the gradient of each micro-batch, and add up what arrives for
    the rank's own shard, in the order of the batch."""

    MEET = "meet"
    """Tell all ranks the norm of this rank's gradients and the losses of its micro-batches."""


COMPUTE = (Verb.FORWARD, Verb.LOSS, Verb.BACKWARD)
"""Verbs that run the model."""

COLLECTIVE = (Verb.GATHER, Verb.EXCHANGE, Verb.MEET)
"""Verbs that all ranks carry out together. A schedule for one rank has none of them."""


class Operation(NamedTuple):
    """One operation of a schedule. Other operations refer to it by its index in the list."""

    verb: Verb
    """What to do."""

    block: int
    """Index of the block."""

    roles: tuple[Role, ...]
    """The block's roles that are moved or updated; empty for compute, and for the drop of a
    gradient of one micro-batch that was sent to the ranks."""

    phase: Phase
    """The half of the step."""

    round: int = 0
    """The round."""

    piece: int | None = None
    """Index of the piece, if the block passes through staging in pieces, or is swept in pieces
    where it is stored. Pieces of trainable tensors are numbered first, then those of frozen
    weights."""

    gpu: bool = False
    """Whether this is part of an optimizer sweep on the GPU. Without a piece, it is the sweep of a
    block that is stored in HBM. With one, the block is stored in host memory, and the piece is
    fetched, swept, offloaded and dropped."""

    after: tuple[int, ...] = ()
    """Operations that must have ended before this one starts."""

    @property
    def lane(self) -> str:
        """Name of the lane, or "" for an operation that takes no time.

        Operations of one lane start in the listed order. Except for sweeps, each starts after the
        previous one has ended.
        """
        # Activations are called "inputs" and offloads "drain" here, because recorded timelines
        # contain the names of lanes.
        match self.verb:
            case Verb.FETCH | Verb.OFFLOAD if self.gpu:
                # Lanes of their own, so that states never wait behind the weights of a block that
                # the CPU has not swept yet.
                return "fetch states" if self.verb is Verb.FETCH else "drain states"
            case Verb.FETCH | Verb.OFFLOAD if Role.ATTENTION in self.roles:
                # Lanes of their own: those of a layer's last micro-batch would otherwise be issued
                # before the activation of its first one, for which the next layer waits.
                return "fetch attention" if self.verb is Verb.FETCH else "drain attention"
            case Verb.FETCH:
                return "fetch inputs" if Role.ACTIVATION in self.roles else "fetch"
            case Verb.OFFLOAD:
                return "drain inputs" if Role.ACTIVATION in self.roles else "drain"
            case Verb.RELEASE | Verb.DROP:
                return ""
            case Verb.READ | Verb.WRITE:
                return str(self.verb)
            case Verb.GATHER | Verb.EXCHANGE | Verb.MEET:
                # One lane: all ranks must make the same collective calls in the same order.
                return "ranks"
            case Verb.SWEEP if not self.gpu:
                return "sweep"
            case Verb.SWEEP if self.piece is not None:
                return "gpu sweep"
            case _:
                return "compute"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of one step, in the order in which they are issued."""

    operations: tuple[Operation, ...]
    """The operations. Each refers only to earlier ones."""

    ranks: int = 1
    """Number of ranks, each of which runs this list."""

    held: frozenset[int] = frozenset()
    """Blocks whose weights and gradient sums have memory of their own in HBM for the whole run,
    because the caller's code computes with them. They need no buffers of the schedule."""

    def __post_init__(self) -> None:
        for i, operation in enumerate(self.operations):
            for j in operation.after:
                assert 0 <= j < i, (i, operation)
