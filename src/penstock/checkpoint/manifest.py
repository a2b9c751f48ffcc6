"""The manifest of a checkpoint: the list of its files, written last.

A directory with a manifest whose files all have the listed sizes is a complete checkpoint.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock import records
from penstock.checkpoint.errors import DamagedCheckpointError
from penstock.errors import RecordError

COMPLETE = "complete.json"
"""Name of the manifest file."""

OPTIMIZER = "optimizer"
"""Stem of the names of files with optimizer states."""

_NAME = re.compile(r"checkpoint-([0-9]{6,18})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of `complete.json`."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT

    step: int
    """Number of optimizer steps taken."""

    files: Mapping[str, int]
    """Size of every file except the manifest, by its path relative to the directory."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise RecordError("version", f"must be {self.FORMAT}, got {self.version}")
        for name in self.files:
            if os.path.isabs(name) or ".." in name.split("/"):
                raise RecordError("files", f"must be inside the directory, got {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    """Number of optimizer steps taken."""
    files: Mapping[str, int]
    """Size of every file, by its path relative to the directory."""

    @property
    def resumable(self) -> bool:
        """Whether it has optimizer states. Without them only its weights can be used."""
        return any(is_optimizer(name) for name in self.files)

    @property
    def nbytes(self) -> int:
        """Total size of the files."""
        return sum(self.files.values())


def is_optimizer(name: str) -> bool:
    """Return whether a file holds optimizer states, from its name."""
    return name.startswith((f"{OPTIMIZER}.", f"{OPTIMIZER}-"))


def folder_name(step: int) -> str:
    """Return the directory name of the checkpoint of a step."""
    return f"checkpoint-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's directory name, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


def write_manifest(folder: Path, step: int, files: Mapping[str, int]) -> None:
    """Write the manifest, which makes the directory a complete checkpoint."""
    records.save(Manifest(step=step, files=files), folder / COMPLETE)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the manifest and check the files.

    Raises DamagedCheckpointError, with the reason, if the checkpoint is not complete.
    """
    path = folder / COMPLETE
    if not os.path.lexists(path):
        problem = f"has no {COMPLETE}, so it was never finished or was not written by Penstock"
        raise DamagedCheckpointError(str(folder), problem)
    try:
        manifest = records.load(Manifest, path)
    except RecordError as error:
        problem = f"its {COMPLETE} is invalid: {error.field} {error.problem}".replace("  ", " ")
        raise DamagedCheckpointError(str(folder), problem) from None
    if manifest.step != step_of(folder.name):
        problem = f"its {COMPLETE} belongs to step {manifest.step}"
        raise DamagedCheckpointError(str(folder), problem)
    for name, nbytes in manifest.files.items():
        _check_file(folder, name, nbytes)
    return Checkpoint(path=folder, step=manifest.step, files=manifest.files)


def _check_file(folder: Path, name: str, nbytes: int) -> None:
    try:
        status = os.stat(folder / name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DamagedCheckpointError(str(folder), f"{name}: {reason}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        problem = f"{name} has {status.st_size} B and was written with {nbytes} B"
        raise DamagedCheckpointError(str(folder), problem)
