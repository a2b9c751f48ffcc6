"""A file to measure with, that no end of the program leaves behind. Room: measure."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from pathlib import Path
from types import TracebackType

from penstock.errors import ProbeError

ALIGNMENT = 4096
"""Of direct requests. Every device in use takes it; many take 512."""


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

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into`, in as many requests as it takes."""
        while into:
            done = os.preadv(self._fd, [into], offset)
            if done == 0:
                raise ProbeError(f"{self._directory}: the file ends at {offset}, before it should")
            into, offset = into[done:], offset + done

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`, in as many requests as it takes."""
        while data:
            done = os.pwritev(self._fd, [data], offset)
            data, offset = data[done:], offset + done

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
