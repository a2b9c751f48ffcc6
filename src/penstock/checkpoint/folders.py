"""Checkpoints in a run's directory: made whole, found, thinned out. Room: keep."""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.disk import sizes_below, sync, sync_tree, told
from penstock.checkpoint.drafts import discard, draft_of
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


@dataclass(frozen=True, slots=True)
class Found:
    """What a run's directory holds, the newest first."""

    whole: tuple[Checkpoint, ...]

    damaged: tuple[DamagedCheckpointError, ...]
    """Why each of the others was passed over."""


def look(out: str | Path) -> Found:
    """Every checkpoint of a run. A directory that is not there holds none."""
    whole, damaged = [], []
    for folder in _folders(Path(out)):
        try:
            whole.append(read_checkpoint(folder))
        except DamagedCheckpointError as reason:
            damaged.append(reason)
    return Found(tuple(whole), tuple(damaged))


def latest(out: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint. `look` says what was passed over, and why."""
    return next(iter(look(out).whole), None)


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
    whole = {found.path: found for found in look(out).whole}
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
