"""The output directory of a run: lock it, and find it again if it is moved or removed.

The run holds a descriptor of the directory from its start to its end. The descriptor refers to the
directory itself and not to its name: it shows where the directory is after `mv`, and that it is
gone after `rm -rf`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from penstock.checkpoint.run_directory import remove_leftovers
from penstock.durable_files import remove_abandoned_drafts
from penstock.train.errors import (
    OutInUseError,
    OutLostError,
    OutNotADirectoryError,
    OutNotEmptyError,
)

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_DELETED = " (deleted)"
"""What the kernel appends to the path of an open file without a name."""


class OutputDirectory:
    """A run's output directory, locked against other processes."""

    def __init__(self, out: str | Path, *, resume: bool) -> None:
        self.path = Path(out)
        """Where the directory is. `find` changes it if the directory was moved."""
        self.on_change: list[Callable[[Path], None]] = []
        """Called with the path after the directory was moved or created again."""
        self._is_changed = False
        if not resume:
            existing = sorted(os.listdir(self.path)) if self.path.is_dir() else []
            if existing:
                raise OutNotEmptyError(str(self.path), existing)
        try:
            self._create()
        except (FileExistsError, NotADirectoryError):
            paths = (self.path, *self.path.parents)
            found = next(path for path in paths if os.path.lexists(path) and not path.is_dir())
            raise OutNotADirectoryError(str(self.path), str(found)) from None
        remove_leftovers(self.path)
        for folder in (self.path, *(entry for entry in self.path.iterdir() if entry.is_dir())):
            if not folder.is_symlink():
                remove_abandoned_drafts(folder)

    def find(self) -> str:
        """Check that `path` is still the directory. Return what was done if it is not, or "".

        A directory that was moved is followed to its new path. One that was removed is created
        again. Raises OutLostError if neither is possible.
        """
        done, former = "", self.path
        if not self._is_at(self.path):
            self._is_changed = True
            done = self._follow() or self._create_again()
        if self._is_changed:
            self._restore_files(former)
        return done

    def _follow(self) -> str:
        """Continue at the path where the directory is now, if there is one."""
        found = self._kernel_path()
        if not found or not self._is_at(Path(found)):
            return ""
        former, self.path = self.path, Path(found)
        return (
            f"warning: {former} was moved to {found} during the run. Everything is written there "
            f"from now on; to resume the run later, use --out {found}"
        )

    def _create_again(self) -> str:
        if not self._is_removed():
            problem = "cannot be found any more (was its disk unmounted?)"
            raise OutLostError(str(self.path), problem)
        if os.path.lexists(self.path):
            raise OutLostError(
                str(self.path), "was removed during the run, and something else has its name now"
            )
        former = self._fd
        try:
            self._create()
        except OSError as error:
            problem = f"was removed during the run and cannot be created again: {error.strerror}"
            raise OutLostError(str(self.path), problem) from error
        os.close(former)
        return (
            f"warning: {self.path} was removed during the run, with all checkpoints in it. It was "
            f"created again with the run's config, tokenizer, settings and metrics"
        )

    def _restore_files(self, former: Path) -> None:
        """Let the owners of files in the directory write them again, or to the new path."""
        try:
            for call in self.on_change:
                call(self.path)
        except OSError as error:
            failed = error.filename or self.path
            problem = f"was moved or removed, and {failed} cannot be written: {error.strerror}"
            raise OutLostError(str(former), problem) from error
        # Only now: a failed attempt is repeated by the next call.
        self._is_changed = False

    def close(self) -> None:
        """Release the lock, and remove the directory if it is empty."""
        with contextlib.suppress(OSError):
            if self._is_at(self.path):
                os.rmdir(self.path)
        os.close(self._fd)

    def _create(self) -> None:
        """Create the directory if it does not exist, open and lock it."""
        self.path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, _OPEN)
        try:
            # The kernel releases the lock when the process dies.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise OutInUseError(str(self.path)) from None
        except OSError:
            pass  # the file system has no locks
        self._fd = fd

    def _is_at(self, path: Path) -> bool:
        """Return whether a path leads to the directory."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except OSError:
            return False

    def _kernel_path(self) -> str:
        """Return what the kernel knows as the path of the descriptor; "" if it does not say."""
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}")
        except OSError:
            return ""

    def _is_removed(self) -> bool:
        try:
            links = os.fstat(self._fd).st_nlink
        except OSError as error:
            return error.errno == errno.ESTALE  # removed on another machine of a network
        return links == 0 or self._kernel_path().endswith(_DELETED)
