"""A ticket or a failure wakes every thread that waits for it on a ticket board, once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from penstock.engine import ticket_board
from penstock.engine.ticket_board import StoppedError, TicketBoard
from penstock.ticket import Finished


def run_concurrently(*calls: Callable[[], object]) -> list[object]:
    """Run every call in its own thread; return what each returned or raised."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a thread still waits"
    return results


def test_several_threads_wait_for_one_ticket() -> None:
    board, ticket = TicketBoard(), Finished(None)
    results = run_concurrently(*[lambda: board.get("a")] * 3, lambda: board.post("a", ticket))

    assert results == [ticket, ticket, ticket, None]
    assert board.awaited_keys() == []


def test_a_failure_wakes_every_waiting_thread() -> None:
    board = TicketBoard()
    waits = [lambda key=key: board.get(key) for key in "abc"]
    results = run_concurrently(*waits, lambda: board.fail(ValueError("broken")))

    assert all(isinstance(each, StoppedError) for each in results[:3])
    assert str(board.failed) == "broken"


def test_a_failed_board_returns_no_ticket() -> None:
    board = TicketBoard()
    board.post("a", Finished(None))
    board.fail(ValueError("broken"))

    with pytest.raises(StoppedError):
        board.get("a")


@pytest.mark.parametrize("ends", ["post", "fail"])
def test_a_waiting_thread_is_woken_without_a_timeout(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_board, "RECHECK_SECONDS", 600.0)
    board = TicketBoard()

    def end() -> None:
        while "a" not in board._waiters:
            pass
        board.post("a", Finished(None)) if ends == "post" else board.fail(ValueError("broken"))

    run_concurrently(lambda: board.get("a"), end)


def test_a_thread_that_was_not_woken_checks_the_board_itself() -> None:
    """This happens when Ctrl-C arrives after the ticket is stored and before waiters are woken."""
    board, ticket = TicketBoard(), Finished(None)

    def post_without_waking() -> None:
        while "a" not in board._waiters:
            pass
        with board._lock:
            board._tickets["a"] = ticket
            del board._waiters["a"]

    assert run_concurrently(lambda: board.get("a"), post_without_waking)[0] is ticket


@pytest.mark.parametrize("seed", range(30))
def test_lanes_that_fail_together_leave_no_thread_waiting(seed: int) -> None:
    rng = random.Random(seed)
    board, failing = TicketBoard(), rng.randrange(40)

    def lane(own: int) -> None:
        try:
            for number in range(20):
                board.post((own, number), Finished(None))
                if own * 20 + number == failing:
                    raise ValueError("broken")
                board.get(((own + 1) % 4, rng.randrange(number + 1)))
        except BaseException as error:
            board.fail(error)
            raise

    results = run_concurrently(*[lambda own=own: lane(own) for own in range(4)])

    assert isinstance(board.failed, ValueError)
    # A lane may have finished before the failure.
    assert all(each is None or isinstance(each, StoppedError | ValueError) for each in results)
