"""A sweep on the CPU that was started and not waited for. Room: move."""

from __future__ import annotations

from penstock.errors import NonFiniteMasterError
from penstock.optim.sweep import Ticket
from penstock.stream.device import Moment


class HostSweep:
    """As a mark. It may still wait for its turn: those before it begin first. Once it has ended it
    keeps none of its tensors: marks live as long as a traceback."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket: Ticket | None = ticket
        self._span = (0.0, 0.0)
        self._refused: tuple[str, int] | None = None

    def settle(self) -> None:
        self.end()
        if self._refused is not None:
            raise NonFiniteMasterError(*self._refused)

    def end(self) -> None:
        """As `settle`, whatever came of it. Several threads may."""
        ticket = self._ticket
        if ticket is None:
            return
        try:
            ticket.wait()
        except NonFiniteMasterError as problem:
            self._refused = problem.name, problem.index
        self._span = ticket.began, ticket.ended
        self._ticket = None

    def span(self) -> tuple[Moment, Moment]:
        """When it began and ended. Only once it is settled."""
        began, ended = self._span
        return Moment(began), Moment(ended)
