"""Threads that load: bounded, and nothing runs after a failure has been told."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.engine.bounded_executor import DEPTH, BoundedExecutor


def test_every_call_is_made_and_several_at_once() -> None:
    together, made = threading.Barrier(3), []

    def call(number: int) -> None:
        together.wait(20)  # three threads are here at the same time, or this fails
        made.append(number)

    with BoundedExecutor(3) as executor:
        for number in range(9):
            executor.submit(lambda number=number: call(number))  # type: ignore[misc]
    assert sorted(made) == list(range(9))


def test_no_more_are_under_way_than_promised() -> None:
    gate, begun = threading.Event(), []

    def feed() -> None:
        with BoundedExecutor(2) as executor:
            for number in range(8):
                begun.append(number)
                executor.submit(lambda: gate.wait(20) and None)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while len(begun) < 2 * DEPTH + 1:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(begun) == 2 * DEPTH + 1  # the last of them waits to be taken
    gate.set()
    feeder.join()
    assert len(begun) == 8


@pytest.mark.parametrize("settles", [True, False], ids=["settled", "left"])
def test_a_failure_is_told_when_nothing_runs_any_more(settles: bool) -> None:
    running, ended = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        time.sleep(0.05)
        ended.set()

    def fails() -> None:
        running.wait(20)
        raise OSError("the disk is gone")

    def load() -> None:
        with BoundedExecutor(2) as executor:
            executor.submit(slow)
            executor.submit(fails)
            if settles:
                executor.wait_all()

    with pytest.raises(OSError, match="the disk is gone"):
        load()
    assert ended.is_set()


def test_what_was_not_begun_is_left_out_when_the_caller_fails() -> None:
    made: list[int] = []

    def load() -> None:
        with BoundedExecutor(1) as executor:
            executor.submit(lambda: time.sleep(0.05))
            executor.submit(lambda: made.append(1))
            raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        load()
    assert made == []


def test_another_ctrl_c_does_not_leave_calls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, pressed = threading.Event(), []

    def slow() -> None:
        time.sleep(0.05)
        ended.set()

    def load() -> None:
        with BoundedExecutor(1) as executor:
            end = executor._pool.shutdown

            def shutdown(**how: bool) -> None:
                if not pressed:
                    pressed.append(True)
                    raise KeyboardInterrupt
                end(**how)

            monkeypatch.setattr(executor._pool, "shutdown", shutdown)
            executor.submit(slow)
            raise KeyError("the caller's own")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert ended.is_set()
