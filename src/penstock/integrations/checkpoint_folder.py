"""Checkpoints of a trainer: Penstock's files in the folders that transformers makes.

A trainer's folder is `checkpoint-<step>`. Penstock writes weights, optimizer states and a manifest
to a draft and renames it to that name, and the trainer adds its own small files. Its state,
`trainer_state.json`, is the last of them, so a folder with it is complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.disk import sizes_below, sync_tree
from penstock.checkpoint.errors import DamagedCheckpointError
from penstock.checkpoint.manifest import (
    COMPLETE,
    Checkpoint,
    check_size,
    find_manifest,
    is_optimizer,
)
from penstock.checkpoint.record_files import record_checkpoint
from penstock.checkpoint.run_directory import discard, draft_of
from penstock.checkpoint.training_state import STATE
from penstock.engine.rank_agreement import all_or_none, share_bytes

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
"""File with the state of the trainer, which the trainer writes last."""

_NAME = re.compile(r"checkpoint-([0-9]+)")


def write_model(engine: Engine, folder: Path, *, tokenizer: Any, optimizer: bool) -> None:
    """Save the weights and, with `optimizer`, what a resume needs; replace an earlier model.

    The files get their names when all of them are complete. Rank 0 calls this, and the other ranks
    `join_write`.
    """
    with contextlib.ExitStack() as opened:
        with all_or_none(engine.ranks):
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft = opened.enter_context(draft_of(folder))
        share_bytes(engine.ranks, str(draft.absolute()).encode())
        engine.write(draft, optimizer=optimizer, tokenizer=tokenizer)
        if folder.exists():
            _replace_files(draft, folder)
        else:
            os.rename(draft, folder)


def join_write(engine: Engine, *, optimizer: bool) -> None:
    """Write this rank's part of a model that rank 0 saves with `write_model`."""
    with all_or_none(engine.ranks):
        pass  # rank 0 makes the draft
    engine.write(share_bytes(engine.ranks).decode(), optimizer=optimizer)


def _replace_files(draft: Path, folder: Path) -> None:
    new = sizes_below(draft)
    # Without a manifest, files of two models are not taken for one.
    (folder / COMPLETE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if is_model_file(path.name) and path.name not in new:
            path.unlink()
    for name in sorted(new, key=lambda name: name == COMPLETE):
        (folder / name).parent.mkdir(exist_ok=True)
        os.replace(draft / name, folder / name)


def is_model_file(name: str) -> bool:
    """Return whether a file has weights, optimizer states or their index, from its name."""
    shards = name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))
    return shards or is_optimizer(name) or name == STATE


def remove_earlier(folder: Path) -> None:
    """Remove a checkpoint of the same step, as the trainer would overwrite it."""
    if folder.is_dir():
        discard(folder)


def seal(folder: Path, step: int) -> None:
    """Record all files of a complete checkpoint in its manifest, and make them durable."""
    record_checkpoint(folder, sizes_below(folder), step=step, run_id="")
    sync_tree(folder)


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of Penstock in a folder; None if transformers wrote it alone.

    Raises DamagedCheckpointError if it is not complete.
    """
    manifest = find_manifest(folder)
    if manifest is None:
        if (folder / STATE).exists():
            raise DamagedCheckpointError(str(folder), f"has no {COMPLETE}: it was never finished")
        return None
    for name, record in manifest.files.items():
        check_size(folder, name, record)
    return Checkpoint(path=folder, manifest=manifest)


def last_checkpoint(out: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, and log why newer ones are left out."""
    steps = [(int(m[1]), p) for p in _subfolders(out) if (m := _NAME.fullmatch(p.name))]
    for _, folder in sorted(steps, reverse=True):
        try:
            _check_trainer_state(folder)
            find_checkpoint(folder)
        except DamagedCheckpointError as problem:
            logger.warning("%s; an earlier checkpoint is used", problem)
        else:
            return folder
    return None


def _subfolders(out: Path) -> list[Path]:
    return [path for path in out.iterdir() if path.is_dir()] if out.is_dir() else []


def _check_trainer_state(folder: Path) -> None:
    try:
        json.loads((folder / TRAINER_STATE).read_text())
    except (OSError, ValueError) as problem:
        raise DamagedCheckpointError(
            str(folder), f"has no complete {TRAINER_STATE}, so it was never finished: {problem}"
        ) from None
