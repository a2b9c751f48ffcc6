"""What makes a directory a whole checkpoint: a list of its files, written last. Room: keep."""

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
OPTIMIZER = "optimizer"
"""How the names of files with optimizer state begin."""

_NAME = re.compile(r"checkpoint-([0-9]{6,18})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The files of a checkpoint."""

    FORMAT: ClassVar[int] = 1

    version: int = FORMAT

    step: int
    """Optimizer steps taken."""

    files: Mapping[str, int]
    """Their bytes, by their names below the directory, this file excepted."""

    def __post_init__(self) -> None:
        if self.version != self.FORMAT:
            raise RecordError("version", f"must be {self.FORMAT}, got {self.version}")
        for name in self.files:
            if os.path.isabs(name) or ".." in name.split("/"):
                raise RecordError("files", f"must lie in the directory, got {name!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A whole one."""

    path: Path
    step: int
    files: Mapping[str, int]

    @property
    def resumable(self) -> bool:
        """It carries optimizer state. Without, training can only start anew from its weights."""
        return any(is_optimizer(name) for name in self.files)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def is_optimizer(name: str) -> bool:
    return name.startswith((f"{OPTIMIZER}.", f"{OPTIMIZER}-"))


def folder_name(step: int) -> str:
    return f"checkpoint-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a directory's name, or None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


def write_manifest(folder: Path, step: int, files: Mapping[str, int]) -> None:
    """Say that these files are all of the checkpoint."""
    records.save(Manifest(step=step, files=files), folder / COMPLETE)


def read_checkpoint(folder: Path) -> Checkpoint:
    """DamagedCheckpointError, with the reason, if it is not whole."""
    path = folder / COMPLETE
    if not os.path.lexists(path):
        problem = f"has no {COMPLETE}, so it was never finished or is not Penstock's"
        raise DamagedCheckpointError(str(folder), problem)
    try:
        manifest = records.load(Manifest, path)
    except RecordError as wrong:
        problem = f"its {COMPLETE} cannot be used: {wrong.field} {wrong.problem}".replace("  ", " ")
        raise DamagedCheckpointError(str(folder), problem) from None
    if manifest.step != step_of(folder.name):
        problem = f"its {COMPLETE} is of step {manifest.step}"
        raise DamagedCheckpointError(str(folder), problem)
    for name, nbytes in manifest.files.items():
        _check_file(folder, name, nbytes)
    return Checkpoint(path=folder, step=manifest.step, files=manifest.files)


def _check_file(folder: Path, name: str, nbytes: int) -> None:
    try:
        found = os.stat(folder / name)
    except (OSError, ValueError) as failed:
        reason = getattr(failed, "strerror", None) or str(failed)
        raise DamagedCheckpointError(str(folder), f"{name}: {reason}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        problem = f"{name} has {found.st_size} B and was written with {nbytes} B"
        raise DamagedCheckpointError(str(folder), problem)
