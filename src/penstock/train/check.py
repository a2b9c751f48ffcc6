"""Check a run, a checkpoint or a model on disk: read everything, and list what is damaged."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.checkpoint.adapter_files import STEM as ADAPTER
from penstock.checkpoint.adapter_files import BaseModel, is_adapter
from penstock.checkpoint.checksums import checksum_file, to_hex
from penstock.checkpoint.errors import ForeignCheckpointError, NoWeightsError
from penstock.checkpoint.manifest import (
    OPTIMIZER,
    SHARD_SUFFIX,
    Manifest,
    check_size,
    checksum_error,
    find_manifest,
    is_optimizer,
    read_checkpoint,
    step_of,
)
from penstock.checkpoint.model_files import list_model_files
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.training_state import TrainingState
from penstock.checkpoint.verify import find_damage
from penstock.errors import PenstockError, SettingsError, SurveyError, UnsupportedModelError
from penstock.settings import HUB_MODEL, RUN_FILE, read_run_id, read_yaml
from penstock.train.best_model import BEST

Progress = Callable[[int, int, str], None]
"""Called with the bytes read, the total, and what is being read."""


@dataclass(slots=True)
class Part:
    """A checkpoint or a model, and what is wrong with it."""

    path: str
    step: int | None = None
    """Step of a checkpoint; None for a model without a manifest."""
    files: int = 0
    nbytes: int = 0
    has_checksums: bool = False
    run_id: str = ""
    resumable: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CheckReport:
    """The result of `check_directory`."""

    path: str
    run_id: str = ""
    parts: list[Part] = field(default_factory=list)
    own_problems: list[str] = field(default_factory=list)
    """What is wrong with the files of the run itself."""

    @property
    def problems(self) -> list[str]:
        return [*self.own_problems, *(text for part in self.parts for text in part.problems)]

    @property
    def notes(self) -> list[str]:
        return [text for part in self.parts for text in part.notes]

    @property
    def verdict(self) -> str:
        """One line for people."""
        resumable = [part for part in self.parts if part.resumable and not part.problems]
        start = f"; the newest step to resume from is {resumable[0].step}" if resumable else ""
        if self.problems:
            number = len(self.problems)
            return f"DAMAGED: {number} problem{'s' if number > 1 else ''}{start}"
        unchecked = sum(not part.has_checksums for part in self.parts)
        rest = f"; {unchecked} of {len(self.parts)} without checksums" if unchecked else ""
        return f"intact{start}{rest}"

    def to_json(self) -> dict[str, Any]:
        parts = [asdict(part) for part in self.parts]
        return {
            "path": self.path, "intact": not self.problems, "verdict": self.verdict,
            "run_id": self.run_id, "parts": parts, "problems": self.problems, "notes": self.notes,
        }  # fmt: skip


def check_directory(folder: Path, progress: Progress | None = None) -> CheckReport:
    """Check a run's output directory, a checkpoint, or a model. Nothing is changed."""
    report = CheckReport(str(folder))
    checkpoints = _checkpoint_folders(folder)
    is_run = bool(checkpoints) or ((folder / RUN_FILE).is_file() and step_of(folder.name) is None)
    models = [folder / HUB_MODEL, folder / BEST] if is_run else []
    parts = [*checkpoints, *(part for part in (folder, *models) if _has_weights(part))]
    if not parts and not is_run:
        parts = [folder]  # a checkpoint that lost its weights has a manifest at least
        if find_manifest(folder) is None:
            raise NoWeightsError(str(folder), "is neither a run, nor a checkpoint, nor a model")
    counter = _Counter(sum(map(_nbytes, parts)), progress)
    report.parts = [_check_part(part, counter) for part in parts]
    if is_run:
        _check_run(folder, report)
    return report


def _check_part(folder: Path, counter: _Counter) -> Part:
    """Check one checkpoint or model."""
    part = Part(str(folder), nbytes=_nbytes(folder))
    add = partial(_collect, part)
    manifest: Manifest | None = None
    with add():
        manifest = find_manifest(folder)
    if step_of(folder.name) is not None:
        with add():
            read_checkpoint(folder)  # also says that there is no manifest, or another step
    if manifest is not None:
        part.step, part.run_id = manifest.step, manifest.run_id
        part.has_checksums = manifest.has_checksums
        part.resumable = any(is_optimizer(name) for name in manifest.files)
    names = {path.relative_to(folder).as_posix() for path in _shards(folder)}
    names |= set(manifest.files) if manifest is not None else set(list_model_files(folder))
    part.files = len(names)
    for name in sorted(names):
        with add():
            _check_file(folder, name, manifest, part, counter)
    if not part.problems:
        _check_content(folder, part)
    return part


def _check_file(
    folder: Path, name: str, manifest: Manifest | None, part: Part, counter: _Counter
) -> None:
    record = None if manifest is None else manifest.files.get(name)
    if record is not None:
        check_size(folder, name, record)
    if name.endswith(SHARD_SUFFIX):
        progress = counter.file((folder / name).stat().st_size)
        with ShardReader(folder / name) as reader:
            part.problems += map(str, find_damage(reader, progress, finite=True))
    elif record is not None and record.crc32c:
        crc = to_hex(checksum_file(folder / name))
        if crc != record.crc32c:
            raise checksum_error(folder, name, expected=record.crc32c, found=crc)


def _check_content(folder: Path, part: Part) -> None:
    """Check that the config, the tokenizer and the states can be loaded, and fit the weights."""
    add = partial(_collect, part)
    if is_adapter(folder):
        with add():
            _check_adapter(folder, part)
    elif _has_weights(folder):
        with add():
            _check_model(folder, part)
    if part.resumable:
        with add(), ShardReader(folder, OPTIMIZER):
            TrainingState.load(folder)
    if (folder / RUN_FILE).is_file():
        with add():
            read_yaml(folder / RUN_FILE)
    try:
        from penstock.data import load_tokenizer

        load_tokenizer(str(folder))
    except PenstockError as problem:
        has_files = any(name.startswith("tokenizer") for name in list_model_files(folder))
        (part.problems if has_files else part.notes).append(str(problem))


def _check_adapter(folder: Path, part: Part) -> None:
    """Compare the headers of an adapter with its base model, if that is on this machine."""
    from penstock.checkpoint.merged_weights import MergedWeights

    base = BaseModel.load(folder)
    if not Path(base.path).is_dir():
        name = base.path or "not recorded"
        part.notes.append(
            f"the adapter is not compared with its base model ({name}), which is not a directory "
            f"on this machine"
        )
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            MergedWeights(folder, Path(base.path)).close()
    except (SurveyError, UnsupportedModelError, SettingsError) as problem:
        part.notes.append(f"the adapter is not compared with its base model: {problem}")


def _check_model(folder: Path, part: Part) -> None:
    """Compare the headers of the weights with the config."""
    from penstock.engine.model_source import check_weights
    from penstock.model.config import load_config
    from penstock.model.survey import survey_config

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tensors that the model does not use
            config = load_config(folder, trust_remote_code=False, trained=False)
            check_weights(folder, survey_config(config, name=str(folder)))
    except (SurveyError, UnsupportedModelError) as problem:
        part.notes.append(f"the weights are not compared with config.json: {problem}")


def _check_run(folder: Path, report: CheckReport) -> None:
    """Check the files of the run itself, and that all checkpoints belong to it."""
    problems = report.own_problems
    try:
        report.run_id = read_run_id(folder / RUN_FILE)
        read_yaml(folder / RUN_FILE)
    except PenstockError as problem:
        problems.append(str(problem))
        report.run_id = next((part.run_id for part in report.parts if part.run_id), "")
    for part in report.parts:
        is_foreign = part.step is not None and part.run_id != report.run_id
        if is_foreign and step_of(Path(part.path).name) is not None:
            wrong = ForeignCheckpointError(part.path, run_id=report.run_id, found=part.run_id)
            part.problems.append(str(wrong))
    for aside in sorted(folder.glob("checkpoint-*.damaged-*")):
        text = f"{aside} was set aside because it is damaged; remove it if you do not need it"
        if report.parts:
            report.parts[0].notes.append(text)


@contextlib.contextmanager
def _collect(part: Part) -> Iterator[None]:
    """Add the errors of a block to the problems of a part."""
    try:
        yield
    except (PenstockError, OSError) as error:
        if str(error) not in part.problems:
            part.problems.append(str(error))


class _Counter:
    """Adds up the bytes of all files."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def file(self, nbytes: int) -> Progress:
        """Return the progress function of the next file."""
        before = self._done
        self._done += nbytes

        def report(done: int, _: int, text: str) -> None:
            if self._progress is not None:
                self._progress(before + done, self._total, f"checking {text}")

        return report


def _checkpoint_folders(folder: Path) -> list[Path]:
    """List the directories of checkpoints, the newest first."""
    found = [(step_of(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [path for step, path in sorted((s, p) for s, p in found if s is not None)][::-1]


def _has_weights(folder: Path) -> bool:
    patterns = (f"model*{SHARD_SUFFIX}", "model*.index.json", f"{ADAPTER}{SHARD_SUFFIX}")
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _shards(folder: Path) -> Iterator[Path]:
    yield from folder.glob(f"model*{SHARD_SUFFIX}")
    yield from folder.glob(f"{ADAPTER}{SHARD_SUFFIX}")
    yield from folder.glob(f"{OPTIMIZER}*{SHARD_SUFFIX}")


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _shards(folder) if path.is_file())
