"""Where threads wait for one another's work to be issued. Room: move."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

from penstock.engine.device import Device, Mark

SLICE = 0.2
"""Seconds of sleep after which a thread looks for itself: so that Ctrl-C is seen, and because one
that came between a mark and its sleepers' release has left them asleep."""


class StoppedError(Exception):
    """Another thread failed; its error is the one to show."""


def _note(failed: BaseException | None, words: str) -> None:
    """Once: several threads may have waited for the same."""
    assert failed is not None
    if words != str(failed) and words not in getattr(failed, "__notes__", ()):
        failed.add_note(words)


class Marks:
    """Marks of one run by name. A reader waits until the writer has issued the work, and only those
    who wait for that work are woken: the others would want the interpreter's lock, one after the
    other, to find that they were not meant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._found: dict[Hashable, Mark] = {}
        self._failed: BaseException | None = None
        self._waiting: dict[int, Hashable] = {}
        self._asleep: dict[Hashable, list[threading.Lock]] = {}

    def put(self, key: Hashable, mark: Mark) -> None:
        with self._lock:
            self._found[key] = mark
            asleep = self._asleep.pop(key, ())
        for sleeper in asleep:
            sleeper.release()

    def get(self, key: Hashable) -> Mark:
        """Raises StoppedError if another thread failed meanwhile."""
        if key not in self._found:  # without the lock: a key is written once
            with self._noted(key):
                self._sleep(key)
        if self._failed is not None:
            raise StoppedError
        return self._found[key]

    def _sleep(self, key: Hashable) -> None:
        """Until the key is there, or somebody failed."""
        sleeper = threading.Lock()
        sleeper.acquire()
        with self._lock:
            if self._failed is not None or key in self._found:
                return
            self._asleep.setdefault(key, []).append(sleeper)
        while not sleeper.acquire(timeout=SLICE):
            if key in self._found or self._failed is not None:
                return

    def settle(self, key: Hashable) -> None:
        """Wait until the work is issued and done."""
        mark = self.get(key)
        with self._noted(key):
            mark.settle()

    def come_after(self, key: Hashable, device: Device) -> None:
        """What is issued next on the device's current lane comes after it. Work of the host's own,
        such as a sweep or a disk's, is waited for."""
        mark = self.get(key)
        with self._noted(key):
            device.wait(mark)

    @contextlib.contextmanager
    def _noted(self, key: Hashable) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._waiting[me] = key
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[me]

    def fail(self, error: BaseException) -> None:
        """The first one counts, and the others are noted with it. Everybody who waits is woken."""
        with self._lock:
            if self._failed is None and not isinstance(error, StoppedError):
                self._failed = error
            elif isinstance(error, Exception) and not isinstance(error, StoppedError):
                _note(self._failed, str(error))
            woken: list[threading.Lock] = []
            if self._failed is not None:
                woken = [sleeper for each in self._asleep.values() for sleeper in each]
                self._asleep.clear()  # each is woken once
        for sleeper in woken:
            sleeper.release()

    def peek(self, key: Hashable) -> Mark | None:
        """Without waiting."""
        return self._found.get(key)

    def has(self, key: Hashable) -> bool:
        return key in self._found

    @property
    def failed(self) -> BaseException | None:
        return self._failed

    def issued(self) -> list[Mark]:
        with self._lock:
            return list(self._found.values())

    def waiting(self) -> list[Hashable]:
        """What threads wait for right now."""
        with self._lock:
            return list(self._waiting.values())
