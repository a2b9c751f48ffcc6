"""A file to measure with, that no end of the program leaves behind. Room: measure."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from penstock import _native
from penstock.errors import ProbeError
from penstock.machine_parts import StorageOperation
from penstock.storage.engines import choose_engine

ALIGNMENT = 4096
"""Of direct requests. Every device in use takes it; many take 512."""

WORKERS = 2
"""Threads that serve io_uring, as many as a store has."""

CLOSE_SECONDS = 10.0


class ScratchFile:
    """An open file without a name: the kernel frees it with the process, kill -9 included.

    Past the page cache (O_DIRECT) where the file system has that; `direct` says so.
    """

    def __init__(self, directory: Path, *, direct: bool = True) -> None:
        self._directory = directory
        self.direct = direct
        self._fd = self._open()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    @contextmanager
    def mover(self, buffer: memoryview, *, block: int, depth: int) -> Iterator[EngineMover]:
        """Moves blocks through the store's engine, `depth` in flight."""
        choice = choose_engine()
        engine = _native.StoreEngine(choice.name, [self._fd], ALIGNMENT, block, depth, WORKERS)
        try:
            yield EngineMover(engine, self._directory, buffer, block, depth)
        finally:
            engine.close(CLOSE_SECONDS)

    def finish_writes(self) -> None:
        """Return when what was written is off the page cache; direct writes never were on it."""
        if not self.direct:
            os.fdatasync(self._fd)

    def forget(self) -> None:
        """Ask the page cache to let go, so that a read is one of the device."""
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self) -> int:
        if self.direct:
            try:
                return self._checked(_open_nameless(self._directory, os.O_DIRECT))
            except OSError as refused:
                # Some file systems refuse at open, some at the first write.
                if refused.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
        return _open_nameless(self._directory, 0)

    def _checked(self, fd: int) -> int:
        try:
            with mmap.mmap(-1, ALIGNMENT) as block:
                os.pwrite(fd, block, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd


class EngineMover:
    """Blocks of one length between a file and a buffer that has one for each request in flight."""

    def __init__(
        self,
        engine: _native.StoreEngine,
        directory: Path,
        buffer: memoryview,
        block: int,
        depth: int,
    ) -> None:
        self._engine, self._directory = engine, directory
        self._buffer, self._block, self._depth = buffer, block, depth
        self._address, _ = _native.buffer_span(buffer, True)

    def __call__(self, operation: StorageOperation, offsets: Sequence[int]) -> None:
        """Returns when all are moved. What requests that overtake each other read is no matter."""
        block, depth = self._block, self._depth
        pieces = [(0, at, k % depth * block, block, 0) for k, at in enumerate(offsets)]
        ways = {"write": (pieces, []), "read": ([], pieces), "both": (pieces[::2], pieces[1::2])}
        transfers = [
            self._engine.start(write, self._address, some, None)
            for write, some in zip((True, False), ways[operation], strict=True)
            if some
        ]
        while not self._engine.wait(transfers, True, 0.1):
            pass  # a look at the signals between two slices
        failed = [transfer.failure for transfer in transfers if transfer.failure is not None]
        if not failed:
            return
        code, _, offset, _, _ = failed[0]
        if code == _native.END_OF_FILE:
            raise ProbeError(f"{self._directory}: the file ends at {offset}, before it should")
        raise OSError(code, os.strerror(code), str(self._directory))


def _open_nameless(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as refused:
        # EISDIR and ENOENT come from kernels and file systems that do not know O_TMPFILE.
        if refused.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    name = directory / f".penstock-probe-{uuid.uuid4().hex}"
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        name.unlink(missing_ok=True)
