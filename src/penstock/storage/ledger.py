"""Which bytes are moving, and which were lost. Room: hold. The store's lock guards it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.storage.errors import ExtentBusyError, LostExtentError
from penstock.storage.layout import Extent
from penstock.storage.tickets import Ticket


class Ledger:
    """Transfers under way, by which their buffers stay, and what failed writes have left behind."""

    def __init__(self) -> None:
        self.moving: list[Ticket] = []
        self._lost: dict[str, list[tuple[int, int, str]]] = {}

    def add(self, ticket: Ticket) -> None:
        self.moving.append(ticket)

    def note_finished(self) -> None:
        """Forget transfers that are done; remember the bytes that failed writes have lost."""
        finished = [ticket for ticket in self.moving if ticket.done]
        if not finished:
            return
        self.moving[:] = [ticket for ticket in self.moving if ticket not in finished]
        for ticket in finished:
            if ticket.verb == "write" and (failed := ticket.failure()):
                span = (ticket.offset, ticket.offset + ticket.length, str(failed))
                self._lost.setdefault(ticket.extent.name, []).append(span)

    def check(self, verb: str, extent: Extent, offset: int, length: int) -> None:
        """No transfer overtakes another over the same bytes, and none reads what was lost."""
        for ticket in self.moving:
            both_read = verb == ticket.verb == "read"
            if not both_read and ticket.overlaps(extent, offset, length):
                raise ExtentBusyError(extent=extent.name, verb=verb, other=ticket.verb)
        lost = self._lost.get(extent.name, [])
        if verb == "write":
            if lost:
                self._lost[extent.name] = list(_without(lost, offset, offset + length))
            return
        for first, last, why in lost:
            if first < offset + length and offset < last:
                raise LostExtentError(
                    extent=extent.name, offset=first, length=last - first, why=why
                )


def _without(
    spans: Iterable[tuple[int, int, str]], first: int, last: int
) -> Iterator[tuple[int, int, str]]:
    """The spans less `[first, last)`."""
    for low, high, why in spans:
        if low < min(high, first):
            yield low, min(high, first), why
        if max(low, last) < high:
            yield max(low, last), high, why
