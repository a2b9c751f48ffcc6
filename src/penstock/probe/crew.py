"""Threads that keep so many requests in flight. Room: measure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

Clock = Callable[[], float]


class Crew:
    """Up to `most` threads, started as they are needed, gone when the block is left."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="penstock-probe")
        self._clock = clock

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        request: Callable[[int, int], None],
        offsets: Iterable[int],
        depth: int,
        last: Callable[[], None] = lambda: None,
    ) -> float:
        """`request(worker, offset)` for each offset, `depth` at a time, then `last()`.

        Returns the seconds from the first request's start to the end. When one fails, or Ctrl-C
        comes, no further request starts and those in flight are waited for.
        """
        shift = _Shift(request, offsets, depth, self._clock)
        workers: list[Future[float]] = []
        try:
            workers += [self._pool.submit(shift.work, worker) for worker in range(depth)]
            first = min([worker.result() for worker in workers])
            last()
            return self._clock() - first
        finally:
            shift.stop()
            wait(workers)


class _Shift:
    """The offsets of one run, taken from by all workers."""

    def __init__(
        self,
        request: Callable[[int, int], None],
        offsets: Iterable[int],
        depth: int,
        clock: Clock,
    ) -> None:
        self._request = request
        self._left = deque(offsets)  # its pops need no lock
        self._start = threading.Barrier(depth)
        self._clock = clock

    def work(self, worker: int) -> float:
        self._start.wait()
        start = self._clock()
        try:
            while True:
                try:
                    offset = self._left.popleft()
                except IndexError:
                    return start
                self._request(worker, offset)
        except BaseException:
            self._left.clear()
            raise

    def stop(self) -> None:
        self._left.clear()
        self._start.abort()  # for those who still wait for the others to arrive
