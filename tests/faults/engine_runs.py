"""Engines in which an operation fails at a chosen moment."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.model.split import SplitModel
from penstock.storage.errors import TransferError
from penstock.storage.store import Store
from penstock.storage.tickets import StoreTicket
from tests.equivalence.runs import DRAM, INTERLEAVED, LATE, RESIDENT, WAYS, Setup, Way

SMALL = Way("all on disk in small pieces", ("nnnn",), {"piece": 4096})
MIXED = Way("weights on disk, states in DRAM", ("nddd", "dndd"), {"piece": 4096})
PLACES = (RESIDENT, DRAM, SMALL, MIXED, INTERLEAVED, LATE[3], LATE[6], LATE[8], WAYS[8])


class BrokenTicket:
    """A read that failed after the transfer."""

    def __init__(self, ticket: StoreTicket) -> None:
        self.ticket = ticket

    def done(self) -> bool:
        return self.ticket.done()

    def settle(self, timeout: float | None = None) -> None:
        self.ticket.settle(timeout)

    def wait(self, timeout: float | None = None) -> None:
        self.ticket.wait(timeout)
        name = self.ticket.extent.name
        raise TransferError(
            verb="read", extent=name, path="disk", offset=0, length=4096, errno=errno.EIO
        )


class Trap:
    """Runs an action once, after a chosen number of calls of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> None:
        self.calls_left: int | None = None
        self.action: Callable[[Any], Any] = lambda out: out
        plain = getattr(kind, method)
        lock = threading.Lock()

        def trapped(*args: Any, **kwargs: Any) -> Any:
            out = plain(*args, **kwargs)
            with lock:
                if self.calls_left is None:
                    return out
                self.calls_left -= 1
                fires = self.calls_left < 0
                if fires:
                    self.calls_left = None
            return self.action(out) if fires else out

        monkeypatch.setattr(kind, method, trapped)

    def set(self, after: int, action: Callable[[Any], Any]) -> None:
        self.calls_left, self.action = after, action

    @property
    def fired(self) -> bool:
        return self.calls_left is None


def raising(error: BaseException) -> Callable[[Any], Any]:
    def action(out: Any) -> Any:
        raise error

    return action


def slow_writes(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.003) -> None:
    """Slow down writes, so that swept pieces wait for their turn to be written."""
    plain = Store.start_write

    def start_write(self: Store, *args: Any, **kwargs: Any) -> StoreTicket:
        time.sleep(seconds)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Store, "start_write", start_write)


_before_the_test: list[threading.Thread] = []


def note_threads() -> None:
    """Note the threads that tests of other files have left running in this process."""
    _before_the_test[:] = threading.enumerate()


def engine_threads() -> list[str]:
    """Return the names of all threads that engines have started since the test began."""
    started = [t for t in threading.enumerate() if t not in _before_the_test]
    return [t.name for t in started if t.name.startswith("penstock ")]


def layers(monkeypatch: pytest.MonkeyPatch) -> Trap:
    """Return a trap in the computing thread."""
    return Trap(monkeypatch, SplitModel, "routed_layer")


def reads(monkeypatch: pytest.MonkeyPatch) -> Trap:
    """Return a trap in a lane that reads."""
    return Trap(monkeypatch, Store, "start_read")


def small_setup() -> Setup:
    return Setup.of("llama", batch=6)
