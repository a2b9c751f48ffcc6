"""What a save asks of the disk: room, order and honest errors. Room: keep."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.checkpoint.errors import CheckpointSpaceError, CheckpointWriteError
from penstock.errors import PenstockError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_room(out: str | Path, nbytes_needed: int) -> None:
    """CheckpointSpaceError if the disk of `out`, which need not be there yet, has less free."""
    free = free_nbytes(out)
    if free < nbytes_needed:
        raise CheckpointSpaceError(str(out), wanted=nbytes_needed, free=free)


def free_nbytes(path: str | Path) -> int:
    """What this user may still write where `path` is, or would be."""
    at = Path(path).absolute()
    while not os.path.exists(at) and at != at.parent:
        at = at.parent
    room = os.statvfs(at)
    return room.f_bavail * room.f_frsize


def sync(path: str | Path) -> None:
    """A file's bytes, or a directory's names, are on the disk when this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """All files below a directory, then the directories, the inner ones first."""
    for at, _, files in os.walk(folder, topdown=False, onerror=_raise):
        for name in files:
            sync(os.path.join(at, name))
        sync(at)


def sizes_below(folder: Path) -> dict[str, int]:
    """Every file below a directory, by its name from there."""
    found = {}
    for at, _, files in os.walk(folder, onerror=_raise):
        for path in (Path(at, name) for name in files):
            about = path.lstat()
            assert stat.S_ISREG(about.st_mode), f"{path} is not a plain file"
            found[path.relative_to(folder).as_posix()] = about.st_size
    return dict(sorted(found.items()))


@contextlib.contextmanager
def told(path: str | Path, wanted: int) -> Iterator[None]:
    """What the kernel says while `wanted` bytes are being saved at `path`, as errors of ours.

    Also what it said to somebody who made another error of it.
    """
    try:
        yield
    except Exception as failed:
        refused = _refusal(failed)
        if refused is None:
            raise
        if refused.errno in _FULL:
            free = free_nbytes(path)
            raise CheckpointSpaceError(str(path), wanted=wanted, free=free, saving=True) from failed
        at = refused.filename if isinstance(refused.filename, str) else str(path)
        raise CheckpointWriteError(at, refused.errno or 0) from failed


def _refusal(failed: BaseException | None) -> OSError | None:
    """The kernel's own error behind this one. Errors of ours that are OSErrors say it already."""
    while isinstance(failed, PenstockError) and not isinstance(failed, OSError):
        failed = failed.__cause__
    ours = isinstance(failed, PenstockError)
    return failed if isinstance(failed, OSError) and not ours else None


def _raise(failed: OSError) -> None:
    raise failed


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not a copy."""
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data
