"""The executor bounds its unfinished calls, and nothing runs after it raises a failure."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.engine.bounded_executor import DEPTH, BoundedExecutor


def test_all_calls_run_and_several_run_concurrently() -> None:
    barrier, finished = threading.Barrier(3), []

    def call(number: int) -> None:
        barrier.wait(20)  # fails unless three threads are here at the same time
        finished.append(number)

    with BoundedExecutor(3) as executor:
        for number in range(9):
            executor.submit(lambda number=number: call(number))  # type: ignore[misc]
    assert sorted(finished) == list(range(9))


def test_the_number_of_unfinished_calls_is_bounded() -> None:
    gate, submitted = threading.Event(), []

    def feed() -> None:
        with BoundedExecutor(2) as executor:
            for number in range(8):
                submitted.append(number)
                executor.submit(lambda: gate.wait(20) and None)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while len(submitted) < 2 * DEPTH + 1:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(submitted) == 2 * DEPTH + 1  # the last one waits in submit
    gate.set()
    feeder.join()
    assert len(submitted) == 8


@pytest.mark.parametrize("waits", [True, False], ids=["wait_all", "leaving the block"])
def test_a_failure_is_raised_after_all_calls_have_ended(waits: bool) -> None:
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
            if waits:
                executor.wait_all()

    with pytest.raises(OSError, match="the disk is gone"):
        load()
    assert ended.is_set()


def test_calls_that_did_not_start_are_dropped_when_the_caller_fails() -> None:
    finished: list[int] = []

    def load() -> None:
        with BoundedExecutor(1) as executor:
            executor.submit(lambda: time.sleep(0.05))
            executor.submit(lambda: finished.append(1))
            raise KeyError("the caller's error")

    with pytest.raises(KeyError, match="the caller's error"):
        load()
    assert finished == []


def test_a_second_ctrl_c_leaves_no_call_running(monkeypatch: pytest.MonkeyPatch) -> None:
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
            raise KeyError("the caller's error")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert ended.is_set()
