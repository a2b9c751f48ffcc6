"""Keep the model with the lowest evaluation loss, next to the checkpoints of a run."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import records
from penstock.checkpoint.disk import sync_tree, translate_write_errors
from penstock.checkpoint.run_directory import draft_name, draft_of
from penstock.durable_files import replace_file, sync
from penstock.errors import RecordError

if TYPE_CHECKING:
    from penstock.train.checkpoints import CheckpointSaver

BEST = "best"
"""Directory of the best model, in the output directory of the run."""

BEST_FILE = "best.json"
"""File in that directory with its step and its loss."""


class BestModel:
    """The directory `best`: a model that transformers loads, without optimizer states.

    A resumed run compares with the loss that the directory states.
    """

    def __init__(self, saver: CheckpointSaver) -> None:
        self._saver = saver
        self.loss = _read_loss(self._path)
        """The lowest evaluation loss so far; infinity before the first."""

    @property
    def _path(self) -> Path:
        return self._saver.out / BEST

    def offer(self, step: int, loss: float) -> Path | None:
        """Save the current weights if the loss is lower than before, and return where.

        A failure leaves the former best model as it was.
        """
        if not loss < self.loss:
            return None
        self._saver.find_directory()
        nbytes = self._saver.model_nbytes
        with translate_write_errors(self._path, nbytes), draft_of(self._path) as folder:
            self._saver.write_tensors(folder, optimizer=False)
            record = json.dumps({"step": step, "loss": loss})
            replace_file(folder / BEST_FILE, record + "\n")
            sync_tree(folder)
            self._replace(folder)
        self.loss = loss
        return self._path

    def _replace(self, folder: Path) -> None:
        former = draft_name(self._path) if self._path.exists() else None
        if former is not None:
            os.rename(self._path, former)
        os.rename(folder, self._path)
        sync(self._path.parent)
        if former is not None:
            shutil.rmtree(former)


def _read_loss(folder: Path) -> float:
    try:
        fields = records.read_json(folder / BEST_FILE)
    except RecordError:
        return math.inf
    loss = records.finite_number(fields.get("loss")) if isinstance(fields, dict) else None
    return math.inf if loss is None else loss
