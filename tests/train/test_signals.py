"""Signals: the first asks the run to stop, the second stops it immediately."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
from pathlib import Path

import pytest

from penstock.train.signals import (
    GuardedStream,
    SignalInterrupt,
    StopRequest,
    interrupt_on_signals,
)
from tests.train.runs import RESIDENT, TIGHT, Runs, run_command, wait_for_line


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


def test_a_closed_terminal_stops_once_although_the_signal_comes_twice() -> None:
    calls: list[object] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with StopRequest(calls.append) as stop:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert (stop.requested, stop.exit_code, calls) == (True, 129, [])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_under_nohup_ignores_the_closed_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_leaves_nothing(
    number: signal.Signals, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has its store then, and the default of the signal would leave it on the drive."""
    drive, out, stores = tmp_path / "drive", tmp_path / "out", list[str]()
    drive.mkdir()

    def interrupt(*_: object) -> None:
        stores.extend(os.listdir(drive))
        signal.raise_signal(number)

    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        monkeypatch.setattr("penstock.train.session.CheckpointSaver", interrupt)
        budgets = (*TIGHT, "--nvme", f"{drive}:64MiB")
        ended = run_command(runs.flags(out, *budgets, "--steps", "1"))
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)

    assert stores, ended.errors
    assert ended.code == 128 + number, ended.errors
    assert "interrupted before the first step" in ended.errors
    assert os.listdir(drive) == []
    assert not out.exists()


def test_the_signals_of_a_closed_terminal_interrupt_once() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with interrupt_on_signals():
            with pytest.raises(SignalInterrupt) as interrupted:
                signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
        assert interrupted.value.exit_code == 129
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interrupt_on_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


class FailingStream(io.StringIO):
    """A stream whose writes fail with one error."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def write(self, text: str) -> int:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(("code", "ended"), [(errno.EPIPE, 141), (errno.EIO, 129)])
def test_a_stream_without_a_reader_requests_a_stop(code: int, ended: int) -> None:
    stop = StopRequest()
    stream = GuardedStream(FailingStream(code), stop)

    assert [stream.write("first"), stream.write("later")] == [5, 5]
    assert stop.exit_code == ended


def test_a_full_disk_under_standard_output_is_still_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        GuardedStream(FailingStream(errno.ENOSPC), StopRequest()).write("text")


def test_a_closed_pipe_saves_a_checkpoint_that_can_be_resumed(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = runs.start(out, *RESIDENT, "--steps", "100000")
    assert child.stdout is not None
    wait_for_line(child, '"step"')
    child.stdout.close()

    with child.stderr or contextlib.nullcontext():
        assert child.wait() == 141
    (saved,) = out.glob("checkpoint-*")
    assert (saved / "complete.json").exists()
    steps = int(saved.name.partition("-")[2])
    resumed = run_command(runs.flags(out, *RESIDENT, "--steps", str(steps + 1), "--resume"))
    assert resumed.code == 0, resumed.errors
    assert list(resumed.losses) == [steps + 1]
