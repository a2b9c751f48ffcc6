"""Signals: the first asks the run to stop, the second stops it immediately."""

from __future__ import annotations

import signal

from penstock.train.signals import StopRequest


def test_the_second_signal_exits_immediately() -> None:
    calls: list[object] = []
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(calls.append) as stop:
        stop.before_exit = lambda: calls.append("terminal")
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        assert (stop.exit_code, calls) == (143, [])
        signal.raise_signal(signal.SIGINT)
        assert calls == ["terminal", 130]
    assert signal.getsignal(signal.SIGINT) is before
