"""Ctrl-C may come anywhere: also between the last line of a `with` block and its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine import determinism
from penstock.engine.interrupts import delayed_interrupts
from penstock.engine.runner import Idle, _ShortSwitchInterval
from penstock.model import attention_replay, unneeded_outputs
from tests.equivalence.runs import ATTENDED, DRAM, Setup

# In a step.


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> list[str]:
    """Let a call of a method end with Ctrl-C before its first line; the list gets its name."""
    original: Callable[..., Any] = getattr(owner, method)
    interrupted: list[str] = []

    def call(*args: Any) -> Any:
        if not interrupted:
            interrupted.append(method)
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(owner, method, call)
    return interrupted


def global_state() -> tuple[object, ...]:
    return (
        unneeded_outputs._current.skips,
        attention_replay._current.handler,
        torch.are_deterministic_algorithms_enabled(),
        sys.getswitchinterval(),
    )


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (unneeded_outputs._Skipping, "__exit__"),
        (attention_replay._Handling, "__exit__"),
        (determinism._Switch, "release"),
        (_ShortSwitchInterval, "stop"),
    ],
    ids=["skipping", "attention", "deterministic", "switch interval"],
)
def test_ctrl_c_at_the_end_of_a_block_changes_no_later_result(
    owner: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, work = DRAM, {}
    if owner is attention_replay._Handling:
        way, work = ATTENDED[0], {"attention": "varlen"}
    setup = Setup.of("llama", dtype="fp32", **work)
    batches, before = setup.batches(4), global_state()
    with setup.engine(way, tmp_path / "plain") as engine:
        expected = [float(engine.step(batch)) for batch in batches[:3]]
        expected.append(engine.evaluate([batches[3]]).loss)

    with setup.engine(way, tmp_path / "interrupted") as engine:
        losses = [float(engine.step(batches[0]))]
        with monkeypatch.context() as patch:
            interrupted = interrupt_once(patch, owner, method)
            with pytest.raises(KeyboardInterrupt):
                engine.forward_backward(batches[1])
            assert interrupted
        if owner is not _ShortSwitchInterval:  # of which `stop` was the last call
            assert global_state() == before
        engine.clear_gradients()
        losses += [float(engine.step(batch)) for batch in batches[1:3]]
        losses.append(engine.evaluate([batches[3]]).loss)

    assert losses == expected
    assert global_state() == before


def test_waiting_for_a_lane_may_be_interrupted_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = Idle()
    waits: list[int] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            idle.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    lane = threading.Timer(0.05, idle.set)
    lane.start()
    idle.wait()
    waits.append(1)
    idle.wait()  # an interrupt may come after the lock was taken, and before `wait` returns

    assert waits
    lane.join()


# Delayed signals.


@pytest.fixture
def stops() -> Any:
    """Let SIGTERM append to the list that is yielded."""
    found: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, previous)


def test_every_signal_in_the_block_reaches_its_handler(stops: list[int]) -> None:
    def send_both() -> None:
        with delayed_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stops == []

    with pytest.raises(KeyboardInterrupt):
        send_both()

    assert stops == [signal.SIGTERM]


def test_ctrl_c_while_handlers_are_restored_leaves_none_behind(
    stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, restore = signal.getsignal(signal.SIGTERM), signal.signal

    def set_and_interrupt(number: int, handler: Any) -> Any:
        found = restore(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            raise KeyboardInterrupt  # as if it had arrived right here
        return found

    monkeypatch.setattr(signal, "signal", set_and_interrupt)
    with pytest.raises(KeyboardInterrupt), delayed_interrupts():
        pass

    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert stops == []
