"""The tickets that every package shares: finished work, and groups."""

from __future__ import annotations

import pytest

from penstock.ticket import Finished, TicketGroup


class Work:
    """A ticket that records how it is used and may fail."""

    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self._log, self._name, self._error = log, name, error
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.settle()
        self._log.append(f"wait {self._name}")
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        if not self.finished:
            self._log.append(f"settle {self._name}")
        self.finished = True


def test_finished_work_returns_its_result_and_the_time_it_ended() -> None:
    ticket = Finished("result", 12.5)

    ticket.settle()
    assert ticket.done()
    assert ticket.wait() == "result"
    assert ticket.at == 12.5


def test_a_group_is_done_when_all_of_its_work_is() -> None:
    first, second = Work([], "first"), Work([], "second")
    group = TicketGroup([first, second])

    assert not group.done()
    first.settle()
    assert not group.done()
    second.settle()
    assert group.done()


def test_a_group_settles_all_work_before_it_raises_the_first_failure() -> None:
    log: list[str] = []
    first = Work(log, "first", ValueError("first failed"))
    second = Work(log, "second", ValueError("second failed"))
    group = TicketGroup([first, second])

    for _ in range(2):
        with pytest.raises(ValueError, match="first failed"):
            group.wait()
    assert log == ["settle first", "settle second", "wait first", "wait first"]
    assert group.finished_at is None


def test_settling_a_group_ignores_failures() -> None:
    group = TicketGroup([Work([], "broken", ValueError("failed"))])

    group.settle()
    assert group.done()


def test_a_group_ended_when_the_last_of_its_transfers_did() -> None:
    """Nobody may look at a write of the last pieces before the step ends."""
    first, second = Finished(None), Finished(None)
    transfers = [Timed(3.0), Timed(5.0), Timed(4.0)]
    group, mixed = TicketGroup(transfers), TicketGroup([*transfers, first, second])

    group.wait()
    mixed.wait()

    assert group.finished_at == 5.0
    assert mixed.finished_at is not None
    assert mixed.finished_at >= first.at, "not all of them know"


class Timed(Finished[None]):
    """Work that knows when it ended."""

    def __init__(self, finished_at: float) -> None:
        super().__init__(None)
        self.finished_at = finished_at


def test_a_group_notes_when_it_was_first_seen_to_succeed() -> None:
    group = TicketGroup([Finished(None)])
    assert group.finished_at is None

    group.wait()
    seen = group.finished_at
    assert seen is not None
    group.wait()
    assert group.finished_at == seen
