"""Tickets: one interface for work that has been started and may still be running.

Everything asynchronous in Penstock returns a ticket: a read or write of the store, an optimizer
sweep on the CPU or on the GPU, the norm of gradients on the GPU, a copy on a CUDA stream. Code that
waits for such work depends on `Ticket` only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """Work that has been started, whose result has type `T_co` (None where only its end matters).

    "Finished" means that the work no longer touches any memory, whether or not it succeeded. All
    methods may be called repeatedly and from any thread.
    """

    def done(self) -> bool:
        """Return whether the work has finished, without blocking."""

    def wait(self) -> T_co:
        """Block until the work has finished; return its result or raise its error."""

    def settle(self) -> None:
        """Block until the work has finished and ignore its failure.

        Cleanup paths use this: a buffer must not be reused or freed before the work that reads or
        writes it has ended, even when nobody wants the result any more.
        """


class Finished(Generic[T]):
    """A ticket for work that had finished by the time the ticket was created."""

    __slots__ = ("at", "result")

    def __init__(self, result: T, at: float | None = None) -> None:
        self.result = result
        self.at = time.perf_counter() if at is None else at
        """Time at which the work finished, by `time.perf_counter`."""

    def done(self) -> bool:
        return True

    def wait(self) -> T:
        return self.result

    def settle(self) -> None:
        return


class TicketGroup:
    """Several pieces of work behind one ticket."""

    __slots__ = ("_tickets", "finished_at")

    def __init__(self, tickets: Sequence[Ticket[object]]) -> None:
        self._tickets = tuple(tickets)
        self.finished_at: float | None = None
        """When the work ended, by `time.perf_counter`; None until `wait` has seen it succeed.

        If not all of the tickets know when their work ended, it is the time at which `wait` saw
        it. The work may have ended earlier then, but never after its user continued.
        """

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        """Block until all have finished, then raise the first failure in the group's order."""
        self.settle()
        for ticket in self._tickets:
            ticket.wait()
        if self.finished_at is None:
            ends = [getattr(ticket, "finished_at", None) for ticket in self._tickets]
            known = [end for end in ends if end is not None]
            self.finished_at = max(known) if known and known == ends else time.perf_counter()

    def settle(self) -> None:
        for ticket in self._tickets:
            ticket.settle()
