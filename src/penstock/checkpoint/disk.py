"""Disk operations of a save: free space, syncing, and translation of OS errors."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.checkpoint.errors import CheckpointSpaceError, CheckpointWriteError
from penstock.durable_files import sync
from penstock.errors import PenstockError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_room(out: str | Path, nbytes_needed: int) -> None:
    """Raise CheckpointSpaceError if the disk of `out` has less free space.

    `out` does not have to exist yet.
    """
    free = free_nbytes(out)
    if free < nbytes_needed:
        raise CheckpointSpaceError(str(out), wanted=nbytes_needed, free=free)


def free_nbytes(path: str | Path) -> int:
    """Return how many bytes this user may still write on the disk of `path`."""
    existing = Path(path).absolute()
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    usage = os.statvfs(existing)
    return usage.f_bavail * usage.f_frsize


def sync_tree(folder: Path) -> None:
    """Sync all files below a directory, then the directories, the inner ones first."""
    for directory, _, files in os.walk(folder, topdown=False, onerror=_raise):
        for name in files:
            sync(os.path.join(directory, name))
        sync(directory)


def sizes_below(folder: Path) -> dict[str, int]:
    """Return the size of every file below a directory, by its relative path."""
    sizes = {}
    for directory, _, files in os.walk(folder, onerror=_raise):
        for path in (Path(directory, name) for name in files):
            status = path.lstat()
            assert stat.S_ISREG(status.st_mode), f"{path} is not a regular file"
            sizes[path.relative_to(folder).as_posix()] = status.st_size
    return dict(sorted(sizes.items()))


@contextlib.contextmanager
def translate_write_errors(path: str | Path, needed: int) -> Iterator[None]:
    """Turn OS errors while `needed` bytes are saved at `path` into checkpoint errors.

    An OS error that was already wrapped in a PenstockError is translated as well.
    """
    try:
        yield
    except Exception as error:
        cause = _os_error_behind(error)
        if cause is None:
            raise
        if cause.errno in _FULL:
            free = free_nbytes(path)
            raise CheckpointSpaceError(str(path), wanted=needed, free=free, saving=True) from error
        failed_path = cause.filename if isinstance(cause.filename, str) else str(path)
        raise CheckpointWriteError(failed_path, cause.errno or 0) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


def _os_error_behind(error: BaseException | None) -> OSError | None:
    """Return the OS error that caused this one.

    Return None for a PenstockError that is itself an OSError: it has the right message already.
    """
    while isinstance(error, PenstockError) and not isinstance(error, OSError):
        error = error.__cause__
    translated = isinstance(error, PenstockError)
    return error if isinstance(error, OSError) and not translated else None


def _raise(error: OSError) -> None:
    raise error
