"""The board on which the lanes of one step post tickets and wait for each other's work.

A lane waits in two stages. It first blocks until another thread has *issued* the work it needs,
that is, posted the ticket; then it waits for the work itself, on the device where that is possible.
The board also carries the first failure to every thread, so that no lane waits for work that will
never be issued.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator

from penstock.engine.device import Device
from penstock.ticket import Ticket

RECHECK_SECONDS = 0.2
"""Longest sleep of a waiting thread before it checks the board itself.

The main thread handles Ctrl-C between two sleeps. It also covers an interrupt that arrives in
`post`
after the ticket is stored but before the waiters are woken."""


class StoppedError(Exception):
    """Another thread failed; the error to show is that thread's."""


class TicketBoard:
    """The tickets of one step by key: the index of an operation, or (index, micro-batch).

    Each key is posted once, by the thread that issues the work. Only the threads that wait for that
    key are woken: with one condition variable for all, every thread would wake up and queue for
    Python's global interpreter lock, only to find that its own key is still missing.
    """

    def __init__(self) -> None:
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called with the first failure, before any thread waits for the others to stop."""
        # Guards every field below. Two unlocked reads are safe: a key in `_tickets` is written once
        # and never removed, and `_failed` changes once, from None.
        self._lock = threading.Lock()
        self._tickets: dict[Hashable, Ticket[object]] = {}
        self._failed: BaseException | None = None
        self._awaited: dict[int, Hashable] = {}  # thread id -> the key it waits for
        self._waiters: dict[Hashable, list[threading.Lock]] = {}

    def post(self, key: Hashable, ticket: Ticket[object]) -> None:
        """Announce that the work for `key` has been issued."""
        with self._lock:
            self._tickets[key] = ticket
            waiters = self._waiters.pop(key, ())
        for waiter in waiters:
            waiter.release()

    def get(self, key: Hashable) -> Ticket[object]:
        """Return the key's ticket; block until it is posted.

        Raises StoppedError if another thread fails in the meantime.
        """
        if key not in self._tickets:
            with self._awaiting(key):
                self._sleep_until_posted(key)
        if self._failed is not None:
            raise StoppedError
        return self._tickets[key]

    def wait(self, key: Hashable) -> None:
        """Block until the work for `key` has been issued and has finished; raise its failure."""
        ticket = self.get(key)
        with self._awaiting(key):
            ticket.wait()

    def order_after(self, key: Hashable, device: Device) -> None:
        """Make the work issued next on the device's current lane start after the work for `key`.

        This blocks until that work has been issued. Work of the host, such as a CPU sweep or a disk
        transfer, must also have finished.
        """
        ticket = self.get(key)
        with self._awaiting(key):
            device.order_after(ticket)

    def fail(self, error: BaseException) -> None:
        """Record a failure and wake every waiting thread.

        The first error is the step's failure; later ones are added to it as notes.
        """
        first = False
        with self._lock:
            if self._failed is None and not isinstance(error, StoppedError):
                self._failed = error
                first = True
            elif isinstance(error, Exception) and not isinstance(error, StoppedError):
                _add_note_once(self._failed, str(error))
            woken: list[threading.Lock] = []
            if self._failed is not None:
                woken = [waiter for waiters in self._waiters.values() for waiter in waiters]
                self._waiters.clear()  # releasing a lock twice is an error
        for waiter in woken:
            waiter.release()
        if first and self.on_failure is not None:
            self.on_failure(error)

    @property
    def failed(self) -> BaseException | None:
        return self._failed

    def peek(self, key: Hashable) -> Ticket[object] | None:
        """Return the key's ticket if it is posted, without waiting."""
        return self._tickets.get(key)

    def has(self, key: Hashable) -> bool:
        return key in self._tickets

    def posted(self) -> list[Ticket[object]]:
        """Return every ticket posted so far."""
        with self._lock:
            return list(self._tickets.values())

    def awaited_keys(self) -> list[Hashable]:
        """Return the keys that threads wait for right now; callable from any thread."""
        with self._lock:
            return list(self._awaited.values())

    def _sleep_until_posted(self, key: Hashable) -> None:
        """Return when the key is posted or a thread has failed."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self._failed is not None or key in self._tickets:
                return
            self._waiters.setdefault(key, []).append(waiter)
        while not waiter.acquire(timeout=RECHECK_SECONDS):
            if key in self._tickets or self._failed is not None:
                return

    @contextlib.contextmanager
    def _awaiting(self, key: Hashable) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._awaited[thread] = key
        try:
            yield
        finally:
            with self._lock:
                del self._awaited[thread]


def _add_note_once(failed: BaseException | None, text: str) -> None:
    """Add a note unless it is there: several threads may have waited for the same failed work."""
    assert failed is not None
    if text != str(failed) and text not in getattr(failed, "__notes__", ()):
        failed.add_note(text)
