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
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.disk import sizes_below, sync, sync_tree, told
from penstock.checkpoint.errors import (
    CheckpointExistsError,
    CheckpointWarning,
    DamagedCheckpointError,
)
from penstock.checkpoint.manifest import (
    Checkpoint,
    folder_name,
    is_optimizer,
    read_checkpoint,
    step_of,
    write_manifest,
)
from penstock.errors import RecordError

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


def remove_leftovers(out: str | Path) -> tuple[Path, ...]:
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


# --------
# Checkpoints in a run's directory: made whole, found, thinned out. Room: keep.


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """What a run's directory holds, the newest first."""

    whole: tuple[Checkpoint, ...]

    damaged: tuple[DamagedCheckpointError, ...]
    """Why each of the others was passed over."""


def list_checkpoints(out: str | Path) -> CheckpointList:
    """Every checkpoint of a run. A directory that is not there holds none."""
    whole, damaged = [], []
    for folder in _folders(Path(out)):
        try:
            whole.append(read_checkpoint(folder))
        except DamagedCheckpointError as reason:
            damaged.append(reason)
    return CheckpointList(tuple(whole), tuple(damaged))


def latest_checkpoint(out: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint. `list_checkpoints` says what was passed over, and why."""
    return next(iter(list_checkpoints(out).whole), None)


@contextlib.contextmanager
def new_checkpoint(out: str | Path, step: int, *, keep: int = 2, nbytes: int = 0) -> Iterator[Path]:
    """An empty directory to fill, which becomes `out/checkpoint-<step>` when the block ends.

    Until then, and if the block or the disk fails, what was there before is all that is there. Then
    all but the `keep` newest are removed, and optimizer state from all but the newest that has it.
    `nbytes` is what the checkpoint is expected to take, for the message when the disk is full.
    """
    if keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep}")
    final = Path(out) / folder_name(step)
    with told(out, nbytes):
        _make_out(Path(out))
        _refuse_whole(final, step)
        with draft_of(final) as folder:
            yield folder
            write_manifest(folder, step, sizes_below(folder))
            sync_tree(folder)
            _set_aside(final)
            os.rename(folder, final)
            sync(out)
    _thin_out(Path(out), final, keep)


def _make_out(out: Path) -> None:
    if not out.is_dir():
        os.makedirs(out, exist_ok=True)
        sync(out.absolute().parent)


def _folders(out: Path) -> list[Path]:
    try:
        entries = [(step_of(e.name), out / e.name) for e in os.scandir(out) if e.is_dir()]
    except FileNotFoundError:
        return []
    steps = [(step, path) for step, path in entries if step is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def _refuse_whole(final: Path, step: int) -> None:
    with contextlib.suppress(DamagedCheckpointError):
        read_checkpoint(final)
        raise CheckpointExistsError(str(final), step)


def _set_aside(final: Path) -> None:
    """A directory of that name that is no whole checkpoint keeps its files under another name."""
    if os.path.lexists(final):
        aside = final.with_name(f"{final.name}.damaged-{secrets.token_hex(4)}")
        os.rename(final, aside)
        message = f"{final} was there and is no whole checkpoint; it is {aside.name} now"
        warnings.warn(message, CheckpointWarning, stacklevel=5)


def _thin_out(out: Path, newest: Path, keep: int) -> None:
    """Of whole checkpoints only: what else lies there may be somebody's."""
    whole = {found.path: found for found in list_checkpoints(out).whole}
    carried = whole.pop(newest).resumable
    for rank, found in enumerate(whole.values(), start=1):
        try:
            if rank >= keep:
                discard(found.path)
            elif carried:
                _drop_optimizer(found)
        except (OSError, RecordError) as failed:
            warnings.warn(
                f"the new checkpoint is whole, but {found.path} could not be thinned out: "
                f"{failed}; remove what you can spare of it by hand",
                CheckpointWarning,
                stacklevel=4,
            )
        carried = carried or found.resumable


def _drop_optimizer(found: Checkpoint) -> None:
    """The list first: a checkpoint may have more files than it lists, never fewer."""
    names = [name for name in os.listdir(found.path) if is_optimizer(name)]
    if found.resumable:
        rest = {name: nbytes for name, nbytes in found.files.items() if not is_optimizer(name)}
        write_manifest(found.path, found.step, rest)
    for name in names:
        os.unlink(found.path / name)
