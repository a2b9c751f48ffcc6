"""The checkpoints in a run's output directory: create, list and thin them out.

A checkpoint is written to a hidden directory, a draft, and renamed when it is complete. The name of
a draft, `.checkpoint-000123.tmp-<pid>-<random>`, says which process writes it. That process holds
the kernel's lock (`flock`) on the directory, which ends with the process however it ends. The lock,
not the pid, decides whether a draft is in use: the pid may belong to another process by now, or to
a process of another container. Only on file systems without such locks does the pid decide.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.checkpoint.disk import sizes_below, sync_tree, translate_write_errors
from penstock.checkpoint.errors import (
    CheckpointExistsError,
    CheckpointWarning,
    DamagedCheckpointError,
    IncompleteCheckpointError,
)
from penstock.checkpoint.manifest import (
    Checkpoint,
    folder_name,
    is_optimizer,
    read_checkpoint,
    step_of,
    write_manifest,
)
from penstock.checkpoint.record_files import record_checkpoint
from penstock.durable_files import sync, try_lock
from penstock.errors import RecordError

_DRAFT_NAME = re.compile(r"\.(?:checkpoint-[0-9]{1,18}|best)\.tmp-([0-9]{1,10})-[0-9a-f]{8}")

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_own_drafts: set[Path] = set()
"""Drafts of this process. On file systems without locks, they cannot be distinguished by pid from
drafts that an earlier process with the same pid left behind."""


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """The checkpoints in a run's directory, newest first."""

    whole: tuple[Checkpoint, ...]
    """The complete checkpoints."""

    damaged: tuple[DamagedCheckpointError, ...]
    """Why each of the other directories is not a complete checkpoint."""


def list_checkpoints(out: str | Path) -> CheckpointList:
    """List every checkpoint of a run. A directory that does not exist has none."""
    whole, damaged = [], []
    for folder in _checkpoint_folders(Path(out)):
        try:
            whole.append(read_checkpoint(folder))
        except DamagedCheckpointError as error:
            damaged.append(error)
    return CheckpointList(tuple(whole), tuple(damaged))


def latest_checkpoint(out: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint. `list_checkpoints` says which ones are damaged."""
    return next(iter(list_checkpoints(out).whole), None)


@contextlib.contextmanager
def new_checkpoint(
    out: str | Path,
    step: int,
    *,
    keep: int = 2,
    keep_resumable: int = 2,
    run_id: str = "",
    nbytes: int = 0,
    needed: Collection[str] = (),
    create: bool = True,
) -> Iterator[Path]:
    """Yield an empty directory, which becomes `out/checkpoint-<step>` when the block ends.

    Until then, and if the block or the disk fails, earlier checkpoints stay as they are. After
    that, all but the `keep` newest checkpoints are removed, and optimizer states stay only in the
    `keep_resumable` newest checkpoints that have them. `run_id` is stored in the manifest. `nbytes`
    is the expected size, for the message when the disk is full. `needed` names files without which
    the checkpoint cannot be loaded or resumed: if one of them is missing at the end, the checkpoint
    is not completed. With `create`, the directory `out` is created if it does not exist.
    """
    if keep < 1 or keep_resumable < 1:
        raise ValueError(f"both must be 1 or more: keep={keep}, keep_resumable={keep_resumable}")
    final = Path(out) / folder_name(step)
    with translate_write_errors(out, nbytes):
        if create:
            _make_directory(Path(out))
        _refuse_to_overwrite(final, step)
        with draft_of(final) as folder:
            yield folder
            sizes = sizes_below(folder)
            if missing := sorted(set(needed) - set(sizes)):
                names = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
                raise IncompleteCheckpointError(str(final), f"{names} disappeared during the save")
            record_checkpoint(folder, sizes, step=step, run_id=run_id)
            # Everything must be on stable storage before the rename, and the rename itself after
            # it: a power cut then leaves either the whole checkpoint or none.
            sync_tree(folder)
            _move_aside(final)
            os.rename(folder, final)
            sync(out)
    # Another process may have removed files of it since they were listed.
    try:
        read_checkpoint(final)
    except DamagedCheckpointError as error:
        raise IncompleteCheckpointError(str(final), error.problem) from error
    thin_out(Path(out), newest=final, keep=keep, keep_resumable=keep_resumable)


def remove_leftovers(out: str | Path) -> tuple[Path, ...]:
    """Remove the drafts of processes that are gone, and return their paths.

    Call this when a run starts.
    """
    folder = Path(out)
    entries = sorted(os.scandir(folder), key=lambda e: e.name) if folder.is_dir() else []
    removed = []
    for entry in entries:
        match = _DRAFT_NAME.fullmatch(entry.name)
        if not match or not entry.is_dir(follow_symlinks=False):
            continue
        path = folder / entry.name
        try:
            if _remove_if_abandoned(path, int(match[1])):
                removed.append(path)
        except OSError as error:
            message = f"{path}: the leftover of a killed run could not be removed: {error.strerror}"
            warnings.warn(message, CheckpointWarning, stacklevel=2)
    return tuple(removed)


@contextlib.contextmanager
def draft_of(final: Path) -> Iterator[Path]:
    """Yield a new, locked directory next to `final`. Remove it at the end unless it was renamed."""
    path, fd = _make_draft(final)
    _own_drafts.add(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _own_drafts.discard(path)
        os.close(fd)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again. Return its new path."""
    aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
    os.rename(folder, aside)
    return aside


def discard(folder: Path) -> None:
    """Remove a checkpoint.

    The rename is atomic, so the checkpoint never appears under its name with some files missing.
    """
    hidden = draft_name(folder)
    os.rename(folder, hidden)
    sync(folder.parent)
    shutil.rmtree(hidden)


def draft_name(final: Path) -> Path:
    """Return a hidden, unique path next to `final` that names this process."""
    return final.with_name(f".{final.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _make_draft(final: Path) -> tuple[Path, int]:
    """Create and lock a draft. Return its path and the descriptor that holds the lock."""
    while True:
        path = draft_name(final)
        os.mkdir(path)
        try:
            fd = os.open(path, _OPEN_DIRECTORY)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        try_lock(fd)
        # Another run that was starting may have removed the draft before it was locked.
        if os.path.exists(path):
            return path, fd
        os.close(fd)


def _remove_if_abandoned(path: Path, pid: int) -> bool:
    try:
        fd = os.open(path, _OPEN_DIRECTORY)
    except FileNotFoundError:  # another process removed it first
        return False
    try:
        locked = try_lock(fd)
        if locked is False or (locked is None and (path in _own_drafts or _is_alive(pid))):
            return False
        shutil.rmtree(path)
        return True
    finally:
        os.close(fd)


def _is_alive(pid: int) -> bool:
    """Return whether another process has this pid.

    A draft with this process's own pid is in `_own_drafts` unless an earlier process left it.
    """
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _make_directory(out: Path) -> None:
    if not out.is_dir():
        os.makedirs(out, exist_ok=True)
        sync(out.absolute().parent)


def _checkpoint_folders(out: Path) -> list[Path]:
    try:
        entries = [(step_of(e.name), out / e.name) for e in os.scandir(out) if e.is_dir()]
    except FileNotFoundError:
        return []
    steps = [(step, path) for step, path in entries if step is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def _refuse_to_overwrite(final: Path, step: int) -> None:
    with contextlib.suppress(DamagedCheckpointError):
        read_checkpoint(final)
        raise CheckpointExistsError(str(final), step)


def _move_aside(final: Path) -> None:
    """Rename a damaged checkpoint of the same step instead of overwriting its files."""
    if os.path.lexists(final):
        aside = set_aside(final)
        message = (
            f"{final} already existed and was not a complete checkpoint; it was renamed to "
            f"{aside.name}"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=5)


def thin_out(out: Path, *, newest: Path, keep: int, keep_resumable: int) -> None:
    """Remove old checkpoints and old optimizer states. `newest` stays, whatever its step is.

    Only complete checkpoints are touched: other directories may not belong to Penstock.
    """
    whole = sorted(list_checkpoints(out).whole, key=lambda found: found.path != newest)
    resumable = 0
    for rank, checkpoint in enumerate(whole):
        resumable += checkpoint.resumable
        try:
            if rank >= keep:
                discard(checkpoint.path)
            elif resumable > keep_resumable or (resumable and not checkpoint.resumable):
                _drop_optimizer_states(checkpoint)
        except (OSError, RecordError) as error:
            warnings.warn(
                f"{newest} is complete, but {checkpoint.path} could not be thinned out: "
                f"{error}; remove the files that you do not need by hand",
                CheckpointWarning,
                stacklevel=4,
            )


def _drop_optimizer_states(checkpoint: Checkpoint) -> None:
    """Remove the optimizer states of a checkpoint and keep its weights."""
    names = [name for name in os.listdir(checkpoint.path) if is_optimizer(name)]
    if checkpoint.resumable:
        manifest = checkpoint.manifest
        rest = {name: record for name, record in manifest.files.items() if not is_optimizer(name)}
        # The manifest first: a checkpoint may have more files than it lists, never fewer.
        write_manifest(checkpoint.path, replace(manifest, files=rest))
    for name in names:
        os.unlink(checkpoint.path / name)
