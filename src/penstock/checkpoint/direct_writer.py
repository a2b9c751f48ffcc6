"""A file that is written from its beginning to its end, past the page cache. Room: keep.

Through the page cache a save ran at two thirds of the disk's speed, and with one request at a time
at three quarters. Here bytes gather in an aligned buffer while threads write others with O_DIRECT.
Room is reserved ahead of them: writes that make a file longer take turns, others do not. What is no
whole number of blocks, at the end or after a short answer of the kernel, and file systems that know
no O_DIRECT, go through the page cache after all, which is told to forget.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from penstock.checkpoint.disk import BLOCK

BUFFER = 4 << 20
REQUESTS = 6
"""That many buffers under way, and one that is filled."""

AHEAD = 128 << 20
"""Bytes that are reserved at once."""

_BEHIND = 64 << 20
"""Bytes that may wait in the page cache, before the kernel is asked to write them out and to forget
those that it has."""


class Output:
    """For one thread; the file descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._direct = _switch(fd, on=True)
        self._free = [_buffer() for _ in range(REQUESTS + 1)]
        self._filling = self._free.pop()
        self._filled = self._at = self._reserved = self._cached = 0
        self._under_way: deque[tuple[Future[None], np.ndarray]] = deque()
        self._threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="penstock save")

    def write(self, data: memoryview) -> None:
        """Take all of it; what went wrong with bytes before may be raised here."""
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER - self._filled)
            given = np.frombuffer(data, np.uint8, count, done)
            self._filling[self._filled : self._filled + count] = given
            self._filled += count
            done += count
            if self._filled == BUFFER:
                self._reserve()
                self._hand_over()

    def sync(self) -> None:
        """All of it is on the disk when this returns."""
        self._hand_over()
        while self._under_way:
            self._settle()
        if self._reserved > self._at:
            os.ftruncate(self.fd, self._at)
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Nothing is under way when this returns."""
        self._threads.shutdown()

    def _reserve(self) -> None:
        """For the buffer that is full. A disk without so much room says so when it is written."""
        if self._direct and self._at + BUFFER > self._reserved:
            try:
                os.posix_fallocate(self.fd, self._at, AHEAD)
                self._reserved = self._at + AHEAD
            except OSError:
                self._reserved = 1 << 62  # not asked again

    def _hand_over(self) -> None:
        if not self._filled:
            return
        data, offset = self._filling[: self._filled].data, self._at
        self._under_way.append((self._threads.submit(self._put, data, offset), self._filling))
        self._at += self._filled
        self._filled = 0
        if not self._free:
            self._settle()
        self._filling = self._free.pop()

    def _settle(self) -> None:
        """Wait for the oldest."""
        oldest, buffer = self._under_way.popleft()
        self._free.append(buffer)
        oldest.result()

    # In the threads.

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            whole = len(data) // BLOCK * BLOCK
            if self._direct and (not whole or offset % BLOCK):
                self._direct = _switch(self.fd, on=False)
            direct = self._direct  # another thread may find out meanwhile
            try:
                count = os.pwrite(self.fd, data[:whole] if direct else data, offset)
            except OSError as refused:  # some file systems say so only now
                if refused.errno != errno.EINVAL or not direct:
                    raise
                self._direct = _switch(self.fd, on=False)
                continue
            offset += count
            data = data[count:]
            if not direct:
                self._forget(count)

    def _forget(self, count: int) -> None:
        """Threads may count past each other, which asks a little later or sooner."""
        self._cached += count
        if self._cached >= _BEHIND:
            self._cached = 0
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _buffer() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, BUFFER), dtype=np.uint8)


def _switch(fd: int, *, on: bool) -> bool:
    """O_DIRECT of an open file; whether it is on now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:  # tmpfs and some others
        return False
    return on
