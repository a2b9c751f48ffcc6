"""A small thread pool for loading weights: some threads wait for the disk while others copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

DEPTH = 2
"""Unfinished calls per thread. It bounds the memory of data that has been read and not copied."""


class BoundedExecutor:
    """Runs calls on a few threads; they start in the order of submission and end in any order.

    `submit` and `wait_all` raise the first failure. After the `with` block no call is running.
    """

    def __init__(self, threads: int) -> None:
        self._limit = DEPTH * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock load")
        self._futures: deque[Future[None]] = deque()

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call; block while too many are unfinished."""
        if len(self._futures) >= self._limit:
            self._futures.popleft().result()
        self._futures.append(self._pool.submit(call))

    def wait_all(self) -> None:
        """Block until every submitted call has ended; raise the first failure."""
        wait(self._futures)
        while self._futures:
            self._futures.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait_all()
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        """Wait for the running calls, even through Ctrl-C, which is raised again afterwards.

        The caller releases the files and the memory that the calls use as soon as this returns.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._pool.shutdown(cancel_futures=True)
                break
            except KeyboardInterrupt as pressed:
                interrupt = pressed
        if interrupt is not None:
            raise interrupt
