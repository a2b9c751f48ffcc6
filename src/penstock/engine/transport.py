"""How ranks reach each other: the interface, and the transport of a single rank.

A rank is one engine with one device. All ranks run the same program, each on its own micro-batches
and on its own shard of every flat buffer. Collective calls only move bytes. Penstock does the
arithmetic, in an order that does not depend on the number of ranks (`gradients.add_in_order`), so
the result does not depend on it either.

Every rank makes the same calls in the same order: those of a step from the thread of the lane
`ranks`, all others between steps. A transport therefore needs no more than one communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.engine.device import Device
from penstock.errors import EngineError
from penstock.memory.arena import Arena
from penstock.memory.placement import Place
from penstock.plan.placement import TransportName
from penstock.plan.workload import Workload


class SharedMemory(Protocol):
    """Host memory that all ranks map. They read each other's weights where these are stored."""

    mailbox: Arena
    """Host buffers of this rank through which data passes to the others."""

    def open_arenas(self, own: Sequence[Arena]) -> Sequence[Sequence[Arena]]:
        """Return the arenas of all ranks, by rank, in the order in which each passes its own.

        `own` has been allocated with `Arena.shared`. All ranks make this call, with equally many
        arenas of the same sizes.
        """

    def arrive(self) -> None:
        """Wait until all ranks have made this call. Work of their devices may still be running."""


class Transport(Protocol):
    """One rank's connection to all ranks."""

    rank: int
    """Number of this rank, from 0."""
    world: int
    """Number of ranks."""

    @property
    def memory(self) -> SharedMemory | None:
        """Memory that the ranks have in common; None if each has only its own."""

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        """Connect the ranks as a plan wants it. All of them call this before they allocate memory.

        `mailbox_nbytes` and `place` are the size and the nodes of the host buffers through which
        data passes if ranks share memory. A transport of one kind only ignores all of it.
        """

    def gather(self, shards: torch.Tensor) -> None:
        """Fill a flat buffer of `world` equal shards, of which the rank's own is filled already."""

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        """Send part `r` of `parts` to rank `r`, and receive one from each of the first ranks.

        Both are flat buffers of `world` equal parts. What rank `r` sends arrives in part `r` of
        `into`. Only ranks 0 to `senders - 1` send; what `parts` holds on the others is ignored.
        """

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Fill a buffer in host memory with what it holds on rank `source`."""

    def meet(self, message: bytes) -> Sequence[bytes]:
        """Return the messages of all ranks, by rank. All of them have the same length."""

    def abort(self, error: BaseException) -> None:
        """Make the calls of all ranks fail, now and later: this rank cannot continue."""


def check_ranks(workload: Workload, ranks: Transport) -> None:
    """Raise EngineError unless a plan is for as many ranks as there are."""
    if workload.world != ranks.world:
        raise EngineError(
            f"the plan is for {workload.world} ranks, but there are {ranks.world}; make a plan for "
            f"{ranks.world}"
        )


class SingleRank:
    """The transport of an engine that is the only rank: everything is here already."""

    rank = 0
    world = 1
    memory = None

    def open(
        self, device: Device, wanted: TransportName | None, mailbox_nbytes: int, place: Place | None
    ) -> None:
        """Do nothing."""

    def gather(self, shards: torch.Tensor) -> None:
        """Do nothing."""

    def exchange(self, parts: torch.Tensor, into: torch.Tensor, senders: int) -> None:
        into.copy_(parts)

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Do nothing."""

    def meet(self, message: bytes) -> Sequence[bytes]:
        return [message]

    def abort(self, error: BaseException) -> None:
        """Do nothing: nobody else waits."""
