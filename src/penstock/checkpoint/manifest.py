"""The manifest of a checkpoint: its files with sizes and checksums, written last.

A directory with a manifest whose files all have the listed sizes is a complete checkpoint. The
checksums say whether the disk still returns the bytes that were written. Manifests of version 1 had
sizes only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from penstock import records
from penstock.checkpoint.checksums import checksum_file, crc32c, to_hex
from penstock.checkpoint.errors import ChecksumError, DamagedCheckpointError
from penstock.errors import RecordError

COMPLETE = "complete.json"
"""Name of the manifest file."""

OPTIMIZER = "optimizer"
"""Stem of the names of files with optimizer states."""

SHARD_SUFFIX = ".safetensors"

_NAME = re.compile(r"checkpoint-([0-9]{6,18})")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What the manifest says about a file. Checksums are eight hexadecimal digits."""

    nbytes: int
    crc32c: str = ""
    """Checksum of the whole file; "" in manifests of version 1."""
    header: str = ""
    """Checksum of the header of a safetensors file, including the length before it."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the tensors of a safetensors file."""

    @classmethod
    def from_number(cls, nbytes: float) -> FileRecord:
        """Read an entry of version 1, which is the size alone."""
        return cls(nbytes=int(nbytes))

    def __post_init__(self) -> None:
        for name in ("crc32c", "header"):
            _check_checksum(name, getattr(self, name))
        for name, crc in self.tensors.items():
            _check_checksum(f"tensors[{name}]", crc)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of `complete.json`."""

    FORMAT: ClassVar[int] = 2
    """Version 1 had no checksums and no run ID."""

    version: int = FORMAT

    step: int
    """Number of optimizer steps taken."""

    run_id: str = ""
    """The run that wrote it; "" if it was started by an earlier version, or from Python."""

    files: Mapping[str, FileRecord]
    """Every file except the manifest, by its path relative to the directory."""

    checksum: str = ""
    """Checksum of everything else in the manifest; see `content_checksum`."""

    def __post_init__(self) -> None:
        if self.version not in (1, self.FORMAT):
            raise RecordError("version", f"must be 1 or {self.FORMAT}, got {self.version}")
        for name, record in self.files.items():
            if os.path.isabs(name) or ".." in name.split("/"):
                raise RecordError("files", f"must be inside the directory, got {name!r}")
            if bool(record.crc32c) != self.has_checksums:
                which = "needs a checksum" if self.has_checksums else "cannot have a checksum"
                raise RecordError(f"files[{name}]", f"{which} in version {self.version}")

    @property
    def has_checksums(self) -> bool:
        """Whether damage by the disk can be detected."""
        return self.version > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        return self.manifest.step

    @property
    def files(self) -> Mapping[str, int]:
        """Size of every file, by its path relative to the directory."""
        return {name: record.nbytes for name, record in self.manifest.files.items()}

    @property
    def resumable(self) -> bool:
        """Whether it has optimizer states. Without them only its weights can be used."""
        return any(is_optimizer(name) for name in self.manifest.files)

    @property
    def nbytes(self) -> int:
        """Total size of the files."""
        return sum(record.nbytes for record in self.manifest.files.values())


def is_optimizer(name: str) -> bool:
    """Return whether a file holds optimizer states, from its name."""
    return name.startswith((f"{OPTIMIZER}.", f"{OPTIMIZER}-"))


def _is_for_resume(name: str) -> bool:
    return is_optimizer(name) or name in ("training_state.json", "run.yaml")


def folder_name(step: int) -> str:
    """Return the directory name of the checkpoint of a step."""
    return f"checkpoint-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's directory name, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and folder_name(int(match[1])) == name else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the directory a complete checkpoint."""
    if manifest.has_checksums:
        plain: Any = records.to_json(replace(manifest, checksum=""))
        manifest = replace(manifest, checksum=content_checksum(plain))
    records.save(manifest, folder / COMPLETE)


def content_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's content, apart from the checksum itself.

    It is that of the JSON text with sorted keys and without spaces.
    """
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return to_hex(crc32c(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()))


def find_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of any directory that Penstock wrote; None if it has none.

    Raises DamagedCheckpointError if the manifest is invalid or has changed.
    """
    path = folder / COMPLETE
    if not os.path.lexists(path):
        return None
    try:
        content = records.read_json(path)
        manifest = records.from_json(Manifest, content, where=str(path))
    except RecordError as error:
        problem = f"its {COMPLETE} is invalid: {error.field} {error.problem}".replace("  ", " ")
        raise DamagedCheckpointError(str(folder), problem) from None
    assert isinstance(content, dict)
    if manifest.has_checksums and manifest.checksum != content_checksum(content):
        problem = f"its {COMPLETE} does not have the content that was written: its checksum differs"
        raise DamagedCheckpointError(str(folder), problem)
    return manifest


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the manifest and check the sizes of the files.

    Raises DamagedCheckpointError, with the reason, if the checkpoint is not complete.
    """
    manifest = find_manifest(folder)
    if manifest is None:
        problem = f"has no {COMPLETE}, so it was never finished or was not written by Penstock"
        raise DamagedCheckpointError(str(folder), problem)
    if manifest.step != step_of(folder.name):
        problem = f"its {COMPLETE} belongs to step {manifest.step}"
        raise DamagedCheckpointError(str(folder), problem)
    for name, record in manifest.files.items():
        check_size(folder, name, record)
    return Checkpoint(path=folder, manifest=manifest)


def check_size(folder: Path, name: str, record: FileRecord) -> None:
    """Raise DamagedCheckpointError unless a file exists and has the size it was written with."""
    try:
        status = os.stat(folder / name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DamagedCheckpointError(str(folder), f"{name}: {reason}") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size != record.nbytes:
        problem = f"{name} has {status.st_size} B and was written with {record.nbytes} B"
        raise DamagedCheckpointError(str(folder), problem)


def check_small_files(folder: str | Path) -> None:
    """Raise ChecksumError if a file other than weights and states has changed since it was written.

    These are the config, the tokenizer, the settings and the training state. Tensors are checked
    while they are read. A directory without checksums passes. What only a resume needs may be
    missing: the rest is a model.
    """
    manifest = find_manifest(Path(folder))
    if manifest is None or not manifest.has_checksums:
        return
    for name, record in manifest.files.items():
        path = Path(folder, name)
        is_removed = _is_for_resume(name) and not os.path.lexists(path)
        if not name.endswith(SHARD_SUFFIX) and not is_removed:
            check_size(Path(folder), name, record)
            crc = to_hex(checksum_file(path))
            if crc != record.crc32c:
                raise checksum_error(Path(folder), name, expected=record.crc32c, found=crc)


def checksum_error(
    folder: Path, name: str, *, expected: str, found: str, tensor: str = ""
) -> ChecksumError:
    """Describe a file or tensor that is not what was written, and name an older checkpoint."""
    older = older_checkpoint(folder, resumable=is_optimizer(name))
    return ChecksumError(
        str(folder / name), tensor=tensor, expected=expected, found=found,
        older="" if older is None else str(older.path),
    )  # fmt: skip


def older_checkpoint(folder: Path, *, resumable: bool) -> Checkpoint | None:
    """Return the newest complete checkpoint next to this one that is older."""
    step = step_of(folder.name)
    if step is None:
        return None
    steps = {step_of(path.name): path for path in folder.parent.iterdir()}
    for number in sorted((n for n in steps if n is not None and n < step), reverse=True):
        with contextlib.suppress(DamagedCheckpointError):
            checkpoint = read_checkpoint(steps[number])
            if checkpoint.resumable or not resumable:
                return checkpoint
    return None


def _check_checksum(name: str, value: str) -> None:
    if value and not _CHECKSUM.fullmatch(value):
        raise RecordError(name, f"must be eight hexadecimal digits, got {value!r}")
