"""A file that is written from its beginning to its end, past the page cache. Room: keep.

Through the page cache a save ran at two thirds of the disk's speed. Here bytes gather in one of two
aligned buffers while a thread writes the other with O_DIRECT. What is no whole number of blocks, at
the end or after a short answer of the kernel, and file systems that know no O_DIRECT, go through
the page cache after all, which is told to forget.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from penstock.checkpoint.disk import BLOCK

BUFFER = 8 << 20

_BEHIND = 64 << 20
"""Bytes that may wait in the page cache. With each of these the kernel is asked to write them out
and to forget those that it has."""


class Output:
    """For one thread; the file descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._direct = _switch(fd, on=True)
        self._memory = [mmap.mmap(-1, BUFFER) for _ in range(2)]
        self._bytes = [np.frombuffer(memory, dtype=np.uint8) for memory in self._memory]
        self._turn = self._filled = 0
        self._under_way: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock save")
        self._at = self._asked = 0

    def write(self, data: memoryview) -> None:
        """Take all of it; what went wrong with bytes before may be raised here."""
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER - self._filled)
            given = np.frombuffer(data, np.uint8, count, done)
            self._bytes[self._turn][self._filled : self._filled + count] = given
            self._filled += count
            done += count
            if self._filled == BUFFER:
                self._hand_over()

    def sync(self) -> None:
        """All of it is on the disk when this returns."""
        self._hand_over()
        self._settle()
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Nothing is under way when this returns."""
        self._thread.shutdown()

    def _hand_over(self) -> None:
        self._settle()
        if self._filled:
            data = self._bytes[self._turn][: self._filled].data
            self._under_way = self._thread.submit(self._put, data)
            self._turn, self._filled = 1 - self._turn, 0

    def _settle(self) -> None:
        before, self._under_way = self._under_way, None
        if before is not None:
            before.result()

    # In the thread.

    def _put(self, data: memoryview) -> None:
        while data:
            whole = len(data) // BLOCK * BLOCK
            if self._direct and (not whole or self._at % BLOCK):
                self._direct = _switch(self.fd, on=False)
            try:
                count = os.write(self.fd, data[:whole] if self._direct else data)
            except OSError as refused:  # some file systems say so only now
                if refused.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = _switch(self.fd, on=False)
                continue
            self._at += count
            data = data[count:]
        if not self._direct and self._at - self._asked >= _BEHIND:
            # Starts the write-out of what is new and drops what was written out since last time.
            start = max(0, self._asked - _BEHIND)
            os.posix_fadvise(self.fd, start, self._at - start, os.POSIX_FADV_DONTNEED)
            self._asked = self._at


def _switch(fd: int, *, on: bool) -> bool:
    """O_DIRECT of an open file; whether it is on now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:  # tmpfs and some others
        return False
    return on
