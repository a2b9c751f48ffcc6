"""The ledger of transfers in flight and of lost bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.storage.errors import ExtentBusyError, LostExtentError, StorageError
from penstock.storage.layout import Extent
from penstock.storage.tickets import StoreTicket, TransferLedger
from penstock.units import KiB

UNIT = 64 * KiB


class FakeTicket:
    def __init__(self, verb: str, extent: Extent, offset: int, length: int) -> None:
        self.verb, self.extent, self.offset, self.length = verb, extent, offset, length
        self.finished = False
        self.failed: StorageError | None = None

    def done(self) -> bool:
        return self.finished

    def failure(self) -> StorageError | None:
        return self.failed

    def overlaps(self, extent: Extent, offset: int, length: int) -> bool:
        return (
            self.extent is extent
            and self.offset < offset + length
            and offset < self.offset + self.length
        )


EXTENT = Extent("moments", 10 * UNIT, 10 * UNIT, 0)


@pytest.mark.parametrize(
    ("in_flight", "started", "allowed"),
    [("read", "read", True), ("read", "write", False), ("write", "read", False),
     ("write", "write", False)],
)  # fmt: skip
def test_only_reads_may_overlap(in_flight: str, started: str, allowed: bool) -> None:
    ledger = TransferLedger()
    ledger.add(FakeTicket(in_flight, EXTENT, 2 * UNIT, 2 * UNIT))  # type: ignore[arg-type]

    ledger.check(started, EXTENT, 4 * UNIT, UNIT)
    ledger.check(started, EXTENT, 0, 2 * UNIT)
    if allowed:
        ledger.check(started, EXTENT, 3 * UNIT, UNIT)
        return
    with pytest.raises(ExtentBusyError, match=f"{started} of bytes that a {in_flight}"):
        ledger.check(started, EXTENT, 3 * UNIT, UNIT)


def test_lost_bytes_are_unreadable_until_they_are_written_again() -> None:
    ledger = TransferLedger()
    ticket = FakeTicket("write", EXTENT, 2 * UNIT, 4 * UNIT)
    ticket.finished, ticket.failed = True, StorageError("the disk is gone")
    ledger.add(ticket)  # type: ignore[arg-type]
    ledger.remove_finished()

    assert ledger.in_flight == []
    ledger.check("read", EXTENT, 0, 2 * UNIT)
    with pytest.raises(LostExtentError, match=r"262144 B at 131072 .* \(the disk is gone"):
        ledger.check("read", EXTENT, 0, 3 * UNIT)
    ledger.check("write", EXTENT, 3 * UNIT, UNIT)  # the middle of the lost range
    ledger.check("read", EXTENT, 3 * UNIT, UNIT)
    for offset in (2 * UNIT, 4 * UNIT, 5 * UNIT):
        with pytest.raises(LostExtentError):
            ledger.check("read", EXTENT, offset, UNIT)
    ledger.check("write", EXTENT, 0, 10 * UNIT)
    ledger.check("read", EXTENT, 0, 10 * UNIT)


@pytest.mark.parametrize(
    ("start", "offset", "length", "expected"),
    [
        (0, 0, 100, False),
        (0, 0, 101, True),
        (0, 150, 10, True),
        (0, 199, 50, True),
        (0, 200, 50, False),
        (0, 50, 300, True),
        (4096, 150, 10, False),
    ],
)
def test_transfers_overlap_if_they_share_a_byte_of_one_extent(
    start: int, offset: int, length: int, expected: bool
) -> None:
    ticket: Any = SimpleNamespace(extent=SimpleNamespace(start=0), offset=100, length=100)
    other: Any = SimpleNamespace(start=start)

    assert StoreTicket.overlaps(ticket, other, offset, length) is expected
