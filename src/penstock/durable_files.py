"""Replace files so that neither a crash nor a power cut leaves part of one.

A file is written under a hidden temporary name, `.NAME.<random>.tmp`, and synced. It is then
renamed, and the directory is synced. While it is written, its process holds the kernel's lock
(`flock`) on it, which ends with the process. So a temporary file without a lock is the leftover of
a dead process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

from penstock.io_retries import is_transient, repeat

SHARED, PRIVATE = 0o666, 0o600
"""Modes of new files, before the umask: as the umask says, or for their owner only."""

_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)

_OLD_DRAFTS = (".run.yaml.tmp", ".metrics.jsonl.tmp")
"""Temporary names that Penstock 0.1 used."""


def replace_file(path: str | Path, content: str | bytes, *, mode: int = SHARED) -> None:
    """Write a whole file. After a failure or a power cut, there is the old file or the new one."""

    def write() -> None:
        with replacement_of(path, mode=mode) as file:
            file.write(content.encode() if isinstance(content, str) else content)

    repeat(write, str(path))


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy the content of a file, and replace `target` by the copy."""

    def copy() -> None:
        with open(source, "rb") as original, replacement_of(target) as file:
            shutil.copyfileobj(original, file)

    repeat(copy, str(target))


def link_file(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links; replace `target`."""
    repeat(lambda: _link_file(source, Path(target)), str(target))


def _link_file(source: str | Path, target: Path) -> None:
    _remove_drafts_of(target)
    draft = _draft_of(target)
    try:
        os.link(source, draft)
    except OSError as error:
        if is_transient(error):
            raise
        copy_file(source, target)
        return
    try:
        os.replace(draft, target)
    finally:
        # If `target` is a link to the same file already, the kernel renames nothing and leaves
        # the draft, which would keep the file's bytes on the disk for ever.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    sync(target.parent)


@contextlib.contextmanager
def replacement_of(path: str | Path, *, mode: int = SHARED) -> Iterator[BufferedWriter]:
    """Yield an open file, which replaces `path` when the block ends without an error."""
    target = Path(path)
    _remove_drafts_of(target)
    draft, fd = _new_draft(target, mode)
    try:
        with name_file(target), open(fd, "wb") as file:
            yield file
            file.flush()
            # Without this sync, a power cut may keep the new name without its data.
            os.fsync(fd)
            # Rename while the file is locked: without the lock it looks like a leftover.
            os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    # Without this one, a power cut may keep the data and lose the name.
    sync(target.parent)


def sync(path: str | Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on stable storage."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with name_file(path):
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Add the path to errors of the operating system that name no file.

    Calls on a descriptor (write, fsync) do not know the path, and without it a user cannot know
    which disk to look at.
    """
    try:
        yield
    except OSError as error:
        # An error of Penstock that is an OSError as well has a message of its own, and no strerror.
        if error.filename is None and error.strerror is not None:
            error.filename = str(path)
        raise


def remove_abandoned_drafts(folder: str | Path) -> tuple[Path, ...]:
    """Remove the temporary files that dead processes left in a directory, and return their paths.

    Only regular files of this user are removed. Where the file system has no locks, all of them
    stay, because nothing says whether their process is alive.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ()
    drafts = [name for name in names if name in _OLD_DRAFTS or _DRAFT.fullmatch(name)]
    return tuple(Path(folder, name) for name in drafts if _remove_if_abandoned(Path(folder, name)))


def _remove_drafts_of(target: Path) -> None:
    """Remove what dead processes left when they wrote the same file."""
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            if (match := _DRAFT.fullmatch(name)) and match["name"] == target.name:
                _remove_if_abandoned(target.with_name(name))


def _remove_if_abandoned(path: Path) -> bool:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        # Open for writing: network file systems lock exclusively only then.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if try_lock(fd):
            os.unlink(path)
            return True
    except OSError:
        pass  # another process removed it first, or the directory is read-only
    finally:
        os.close(fd)
    return False


def _draft_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _new_draft(target: Path, mode: int) -> tuple[Path, int]:
    """Create and lock a temporary file that did not exist. A planted link is never followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        draft = _draft_of(target)
        try:
            fd = os.open(draft, flags, mode)
        except FileExistsError:
            continue
        # Another process may have taken the file for a leftover before it was locked.
        if try_lock(fd) is not False and os.path.lexists(draft):
            return draft, fd
        os.close(fd)


def try_lock(fd: int) -> bool | None:
    """Try to lock a file or directory. Return None if the file system has no locks for it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True
