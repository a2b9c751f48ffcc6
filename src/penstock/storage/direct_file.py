"""Read and write files past the page cache (O_DIRECT).

`DirectFile` moves a few whole blocks, such as headers, synchronously. `DirectWriter` writes a file
from start to end with several requests in flight. Bulk transfers of a store go through the native
engine instead (see `penstock.storage.engines`).

O_DIRECT requires offsets, lengths and addresses to be multiples of the device's block size. Some
file systems (tmpfs, some network file systems) refuse it, either when the file is opened or at the
first transfer. Both classes then switch the file to buffered I/O.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.io_retries import repeat
from penstock.units import MiB, round_up

BLOCK = 4096
"""Alignment that every device in use accepts for direct I/O; many accept 512 as well."""

BUFFER_NBYTES = 4 * MiB
"""Size of one request of a `DirectWriter`."""

REQUESTS = 6
"""Requests of a `DirectWriter` in flight; one more buffer is being filled."""

RESERVE_NBYTES = 128 * MiB
"""Disk space that a `DirectWriter` preallocates in one step."""

_MAX_CACHED_NBYTES = 64 * MiB
"""Bytes written through the page cache before the kernel is asked to drop them."""


def is_direct_io_refused(error: OSError) -> bool:
    """Return whether an error means that the file system does not support O_DIRECT."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def set_direct(fd: int, *, on: bool) -> bool:
    """Turn O_DIRECT of an open file on or off. Return whether it is on now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:  # tmpfs and some others
        return False
    return on


@dataclass(slots=True)
class DirectFile:
    """An open file or device that is accessed past the page cache where that is possible."""

    fd: int
    """File descriptor; -1 after `close`."""
    direct: bool
    """Whether the file is open with O_DIRECT."""
    alignment: int = BLOCK
    """Offsets and buffer addresses are multiples of this; lengths are padded to it."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> DirectFile:
        """Open `path` with O_DIRECT, or without it if the file system refuses the flag."""
        flags |= os.O_CLOEXEC
        try:
            return cls(os.open(path, flags | os.O_DIRECT, mode), direct=True)
        except OSError as error:
            if not is_direct_io_refused(error):
                raise
        # The refused call may have created the file already, so it may exist now. O_EXCL stays for
        # block devices, which are opened without O_CREAT: there it claims the device.
        if flags & os.O_CREAT:
            flags &= ~os.O_EXCL
        return cls(os.open(path, flags, mode), direct=False)

    def write_blocks(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`, padded with zeros to whole blocks."""
        with mmap.mmap(-1, round_up(len(data), self.alignment)) as aligned:
            aligned.write(data)
            view = memoryview(aligned)
            try:
                written = self._write(view, offset)
            finally:
                view.release()
            if written != len(aligned):
                raise OSError(errno.EIO, f"{written} of {len(aligned)} B written")

    def read_blocks(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` at `offset`, or fewer if the file ends before that."""
        with mmap.mmap(-1, round_up(nbytes, self.alignment)) as aligned:
            view = memoryview(aligned)
            try:
                return bytes(view[: min(os.preadv(self.fd, [view], offset), nbytes)])
            finally:
                view.release()

    def close(self) -> None:
        """Close the file. Calling this twice is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _write(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwritev(self.fd, [view], offset)
        except OSError as error:
            # Some file systems accept O_DIRECT at open and refuse it at the first write.
            if not self.direct or not is_direct_io_refused(error):
                raise
        self.direct = set_direct(self.fd, on=False)
        return os.pwritev(self.fd, [view], offset)


class DirectWriter:
    """Write an open file from start to end, with several direct requests in flight.

    Buffered writes reach about two thirds of a fast disk's speed, and direct writes with one
    request at a time about three quarters. This class copies the data into aligned buffers, which a
    few threads write concurrently. Space is preallocated ahead of the writes, because the kernel
    serializes writes that extend a file.

    The end of a file that is not a whole block, the rest of a short write, and file systems without
    O_DIRECT go through the page cache, and the kernel is asked to drop those pages.

    A request that fails for a moment is repeated. A failed sync is not: its data may be lost, and
    only the caller can write all of it again.

    One thread at a time may use a writer. The file descriptor stays the caller's, and `path` names
    it in errors.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self._path = fd, path
        # Worker threads may turn this off; they never turn it on again.
        self._direct = set_direct(fd, on=True)
        self._free = [_aligned_array(BUFFER_NBYTES) for _ in range(REQUESTS + 1)]
        self._filling = self._free.pop()
        self._filled = 0  # bytes in `_filling`
        self._submitted = 0  # file offset at which `_filling` will be written
        self._reserved = 0  # the file is preallocated up to this offset
        self._cached = 0  # bytes in the page cache since the last request to drop them
        self._in_flight: deque[tuple[Future[None], np.ndarray]] = deque()
        self._threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="penstock save")

    def write(self, data: memoryview) -> None:
        """Append `data`, which may be reused when this returns.

        Raises OSError if an earlier request failed.
        """
        done = 0
        while done < len(data):
            count = min(len(data) - done, BUFFER_NBYTES - self._filled)
            self._filling[self._filled : self._filled + count] = np.frombuffer(
                data, np.uint8, count, done
            )
            self._filled += count
            done += count
            if self._filled == BUFFER_NBYTES:
                self._reserve()
                self._submit()

    def sync(self) -> None:
        """Write everything that is buffered and wait until it is on stable storage."""
        self._submit()
        while self._in_flight:
            self._wait_for_oldest()
        if self._reserved > self._submitted:
            os.ftruncate(self.fd, self._submitted)
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Wait for the requests in flight and stop the threads."""
        self._threads.shutdown()

    def _reserve(self) -> None:
        """Preallocate space for the full buffer if there is none left."""
        if self._direct and self._submitted + BUFFER_NBYTES > self._reserved:
            try:
                os.posix_fallocate(self.fd, self._submitted, RESERVE_NBYTES)
                self._reserved = self._submitted + RESERVE_NBYTES
            except OSError:
                # Do not ask again. If the disk is full, the write itself will say so.
                self._reserved = 1 << 62

    def _submit(self) -> None:
        """Hand the current buffer to a thread and continue with a free one."""
        if not self._filled:
            return
        data, offset = self._filling[: self._filled].data, self._submitted
        self._in_flight.append((self._threads.submit(self._put, data, offset), self._filling))
        self._submitted += self._filled
        self._filled = 0
        if not self._free:
            self._wait_for_oldest()
        self._filling = self._free.pop()

    def _wait_for_oldest(self) -> None:
        request, buffer = self._in_flight.popleft()
        # Return the buffer first: a failed request must not make the next `_submit` run out of
        # buffers. It is free to reuse once `result` returns or raises.
        self._free.append(buffer)
        request.result()

    # The methods below run in the threads.

    def _put(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, however little the kernel accepts per call."""
        while data:
            whole = len(data) // BLOCK * BLOCK
            if self._direct and (not whole or offset % BLOCK):
                self._direct = set_direct(self.fd, on=False)
            # Read the flag once: another thread may turn O_DIRECT off in the meantime, and then
            # this write merely goes through the page cache.
            direct = self._direct
            try:
                part = data[:whole] if direct else data
                count = repeat(partial(os.pwrite, self.fd, part, offset), self._path)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._direct = set_direct(self.fd, on=False)
                continue
            offset += count
            data = data[count:]
            if not direct:
                self._drop_cached_pages(count)

    def _drop_cached_pages(self, count: int) -> None:
        # The threads update the counter without a lock. A lost update only moves the point at
        # which the kernel is asked.
        self._cached += count
        if self._cached >= _MAX_CACHED_NBYTES:
            self._cached = 0
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _aligned_array(nbytes: int) -> np.ndarray:
    """Allocate page-aligned memory."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
