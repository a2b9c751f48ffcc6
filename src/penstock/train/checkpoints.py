"""Save the checkpoints of a run, and publish its model at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.adapter_files import STEM as ADAPTER
from penstock.checkpoint.disk import check_room, free_nbytes
from penstock.checkpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    DamagedCheckpointError,
)
from penstock.checkpoint.manifest import (
    COMPLETE,
    folder_name,
    read_checkpoint,
    write_manifest,
)
from penstock.checkpoint.run_directory import list_checkpoints, new_checkpoint, thin_out
from penstock.checkpoint.training_state import STATE, Software, TrainingState
from penstock.durable_files import link_file
from penstock.io_retries import repeat
from penstock.records import to_json
from penstock.settings import AFFECTS_RESULT, RUN_FILE, Settings, write_yaml
from penstock.train.events import ReportProgress
from penstock.train.model_card import TrainingResult, write_model_card
from penstock.train.output_directory import OutputDirectory
from penstock.train.rank_commands import RankLeader
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

_SAVE_PAUSES = (0.5, 1.0)
"""Seconds before a save is repeated that failed for a moment. Its single writes have been repeated
already, so that this is for errors of fsync."""


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How far a run has come, besides what the engine knows."""

    step: int
    """Number of batches taken, including skipped ones. Checkpoints are named by it."""
    data: Any
    """Position in the data."""
    schedule: Any
    """The learning-rate schedule."""


class CheckpointSaver:
    """Saves checkpoints of an engine into the output directory of a run."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        directory: OutputDirectory,
        note: Callable[[str], None],
        run_id: str = "",
        leader: RankLeader | None = None,
    ) -> None:
        self._engine, self._directory, self._note = engine, directory, note
        self._leader = leader
        self.settings = settings
        """Settings of the run. If the output directory is moved, its new path is in them."""
        directory.on_change.append(self._follow)
        self._with_optimizer = not settings.checkpoint.save_weights_only
        writers = engine.files.writers(optimizer=self._with_optimizer)
        self._sizes = [writer.nbytes for writer in writers]
        self._tensor_files = [name for writer in writers for name in writer.names]
        self.before_save: list[Callable[[], None]] = []
        """Called before a checkpoint is written, which makes files durable that belong to it."""
        self.run_id = run_id
        """ID of the run, which its checkpoints carry."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint of this run."""

    @property
    def nbytes(self) -> int:
        """Size of one checkpoint."""
        return sum(self._sizes)

    @property
    def model_nbytes(self) -> int:
        """Size of the weights in a checkpoint."""
        return self._sizes[0]

    def check_space(self) -> None:
        """Raise CheckpointSpaceError unless the disk has space for the checkpoints of the run.

        While a checkpoint is written, the `keep` earlier ones still exist. One of them has to keep
        its optimizer states until the new one is complete; the others do if there is space.
        """
        weights, states = self._sizes[0], sum(self._sizes[1:])
        chosen = self.settings.checkpoint
        needed = (chosen.keep + 1) * weights + 2 * states
        if self.settings.evaluation.save_best:
            needed += 2 * weights  # a new one is written before the former is removed
        existing = sum(checkpoint.nbytes for checkpoint in list_checkpoints(self.out).whole)
        check_room(self.out, max(self.nbytes, needed - existing))
        number = min(chosen.keep, chosen.keep_resumable)
        more, free = needed + (number - 1) * states - existing, free_nbytes(self.out)
        if states and number > 1 and free < more:
            self._note(
                f"note: {self.out} has {format_bytes(free)} free, and {number} checkpoints with "
                f"optimizer states while the next one is written need {format_bytes(more)}. Before "
                f"a save, the states of all but the newest checkpoint are removed: until it is "
                f"complete, there is only one checkpoint to resume from"
            )

    def _make_room(self) -> None:
        """Remove older optimizer states if the next checkpoint does not fit otherwise."""
        if free_nbytes(self.out) >= self.nbytes:
            return
        resumable = [found for found in list_checkpoints(self.out).whole if found.resumable]
        if len(resumable) > 1:
            newest, keep = resumable[0].path, self.settings.checkpoint.keep
            thin_out(self.out, newest=newest, keep=keep, keep_resumable=1)

    @property
    def out(self) -> Path:
        """The output directory."""
        return Path(self.settings.checkpoint.out)

    def _follow(self, path: Path) -> None:
        self.settings = self.settings.replace({"out": str(path)})

    def find_directory(self) -> bool:
        """Follow or restore the output directory, and return whether that was necessary."""
        done = self._directory.find()
        if done:
            self._note(done)
        return bool(done)

    def is_saved(self, step: int) -> bool:
        """Return whether the checkpoint that this run saved at a step is still complete."""
        if self.saved_step != step:
            return False
        try:
            read_checkpoint(self.out / folder_name(step))
        except DamagedCheckpointError:
            return False
        return True

    def save(self, position: RunPosition, report: ReportProgress | None = None) -> Path:
        """Save a checkpoint. On an error there is none, and training may continue."""
        self.find_directory()
        for prepare in self.before_save:
            prepare()
        attempts = itertools.count()

        def write() -> None:
            try:
                first = not next(attempts)
                self._write(position, report)
            except CheckpointExistsError:
                # An earlier attempt failed after the checkpoint had got its name. Its files are on
                # stable storage; whether the name is, is not known, and older checkpoints remain.
                if first:
                    raise

        try:
            # The whole checkpoint again: after a failed fsync, nothing says which bytes are lost.
            repeat(write, str(self.out), _SAVE_PAUSES)
        except (CheckpointError, OSError):
            # If the directory was moved or removed during the save, save again in its new place.
            if not self.find_directory():
                raise
            write()
        self.saved_step = position.step
        return self.out / folder_name(position.step)

    def _write(self, position: RunPosition, report: ReportProgress | None) -> None:
        assert self._engine.model_files is not None
        self._make_room()
        with new_checkpoint(
            self.out,
            position.step,
            keep=self.settings.checkpoint.keep,
            keep_resumable=self.settings.checkpoint.keep_resumable,
            run_id=self.run_id,
            nbytes=self.nbytes,
            needed=(*self._tensor_files, *self._engine.model_files.names, STATE, RUN_FILE),
            # `find` has created it. If it was removed since, its other files must be restored, too.
            create=False,
        ) as folder:
            self.write_tensors(folder, optimizer=self._with_optimizer, report=report)
            # Replaces the state that the engine wrote, which has only the engine's part.
            self._training_state(position).save(folder)
            # A resume uses this copy if the run's own is lost or damaged.
            write_yaml(self.settings, folder / RUN_FILE, run_id=self.run_id)

    def write_tensors(
        self, folder: Path, *, optimizer: bool, report: ReportProgress | None = None
    ) -> None:
        """Write the model and, with `optimizer`, its states, together with all other ranks."""
        if self._leader is not None:
            self._leader.write(str(folder), optimizer=optimizer)
        self._engine.write(folder, optimizer=optimizer, progress=report)

    def publish(self, result: TrainingResult) -> None:
        """Put the newest checkpoint's weights and a model card next to the config."""
        assert self.saved_step is not None
        folder = self.out / folder_name(self.saved_step)
        target = self.settings.checkpoint.model_directory
        target.mkdir(exist_ok=True)
        # The manifest of an earlier model goes first, and that of this one comes last.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target / COMPLETE)
        names = sorted(n for n in os.listdir(folder) if n.startswith(("model", ADAPTER)))
        # Link the index last: a reader that finds it finds all shards.
        for name in sorted(names, key=lambda n: n.endswith(".json")):
            link_file(folder / name, target / name)
        manifest = read_checkpoint(folder).manifest
        if manifest.has_checksums:
            files = {name: record for name, record in manifest.files.items() if name in names}
            write_manifest(target, replace(manifest, files=files))
        write_model_card(target, self.settings, result)

    def _training_state(self, position: RunPosition) -> TrainingState:
        engine = self._engine
        values = self.settings.flat()
        settings = {name: to_json(values[name]) for name in AFFECTS_RESULT}
        numerics = engine.result_record() | {"settings": settings}
        return TrainingState(
            engine=engine.state_record(),
            software=Software.here(gpu=engine.on_gpu),
            schedule=position.schedule,
            data=position.data,
            numerics=numerics,
        )
