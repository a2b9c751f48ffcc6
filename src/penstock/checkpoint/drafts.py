"""Directories that are not checkpoints yet, or no more. Room: keep.

Their names begin with a dot and say whose they are: `.checkpoint-000123.tmp-<pid>-<random>`. The
maker holds the kernel's lock on the directory, which ends with the process however that ends; a
pid alone may be another process by now, or one of another container. Where the file system has no
such locks, the pid decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from penstock.checkpoint.disk import sync
from penstock.checkpoint.errors import CheckpointWarning

_NAME = re.compile(r"\.checkpoint-[0-9]{6,18}\.tmp-([0-9]{1,10})-[0-9a-f]{8}")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_held: set[Path] = set()
"""Drafts of this process: where there are no locks, its own pid says nothing."""


@contextlib.contextmanager
def draft_of(final: Path) -> Iterator[Path]:
    """A new directory beside `final`, removed at the end unless it has been renamed by then."""
    path, fd = _make(final)
    _held.add(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _held.discard(path)
        os.close(fd)


def discard(folder: Path) -> None:
    """Remove a checkpoint: first its name, at once, then its files."""
    gone = draft_name(folder)
    os.rename(folder, gone)
    sync(folder.parent)
    shutil.rmtree(gone)


def sweep_leftovers(out: str | Path) -> tuple[Path, ...]:
    """Remove the drafts of processes that are gone; those removed. Call it when a run starts."""
    folder = Path(out)
    entries = sorted(os.scandir(folder), key=lambda e: e.name) if folder.is_dir() else []
    removed = []
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if not match or not entry.is_dir(follow_symlinks=False):
            continue
        path = folder / entry.name
        try:
            if _remove_if_left(path, int(match[1])):
                removed.append(path)
        except OSError as failed:
            message = f"{path}: what a killed run left could not be removed: {failed.strerror}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)
    return tuple(removed)


def draft_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _make(final: Path) -> tuple[Path, int]:
    while True:
        path = draft_name(final)
        os.mkdir(path)
        try:
            fd = os.open(path, _DIRECTORY)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        _try_lock(fd)
        # Before it was locked, a run that was starting could take it for a leftover.
        if os.path.exists(path):
            return path, fd
        os.close(fd)


def _remove_if_left(path: Path, pid: int) -> bool:
    try:
        fd = os.open(path, _DIRECTORY)
    except FileNotFoundError:  # somebody else was quicker
        return False
    try:
        locked = _try_lock(fd)
        if locked is False or (locked is None and (path in _held or _lives(pid))):
            return False
        shutil.rmtree(path)
        return True
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Whether it is ours now; None where the file system has no locks on directories."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failed:
        return False if failed.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _lives(pid: int) -> bool:
    """Another process of that pid. Ours would have the draft among those it holds."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
