"""A few threads that carry out short calls, one of which waits for a disk while another copies: for
loading. Room: move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

DEPTH = 2
"""Calls for each thread that were begun and not yet seen to end: what bounds memory on the way."""


class BoundedExecutor:
    """Calls begin in the order in which they are given, and end in any.

    The first failure is raised by `start` or `settle`; whoever leaves the `with` block finds no
    call running.
    """

    def __init__(self, threads: int) -> None:
        self._most = DEPTH * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock load")
        self._under_way: deque[Future[None]] = deque()

    def start(self, call: Callable[[], None]) -> None:
        """Waits while too many are under way."""
        if len(self._under_way) >= self._most:
            self._under_way.popleft().result()
        self._under_way.append(self._pool.submit(call))

    def settle(self) -> None:
        """All that was started has ended."""
        wait(self._under_way)
        while self._under_way:
            self._under_way.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self._end()

    def _end(self) -> None:
        """Files and memory that calls use may go when this returns, or raises another Ctrl-C."""
        again: KeyboardInterrupt | None = None
        while True:
            try:
                self._pool.shutdown(cancel_futures=True)
                break
            except KeyboardInterrupt as pressed:
                again = pressed
        if again is not None:
            raise again
