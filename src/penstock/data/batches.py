"""Packed rows as batches, from any position on. Room: show.

A batch is a dict of CPU tensors: `input_ids`, `labels` (not shifted; -100 where nothing is trained)
and `position_ids`, which begin at 0 with each document: that is how a document's beginning is
known. Padding is a document of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.data.errors import CacheError, DataError, PositionError
from penstock.data.packing import Counts, Rows
from penstock.data.shuffle import shuffled
from penstock.data.token_cache import Cache

if TYPE_CHECKING:
    import torch

IGNORED = -100
POSITION_VERSION = 1


class Packed:
    """Rows of one length, each whole documents and padding."""

    def __init__(
        self, cache: Cache, rows: Rows, context: int, *, pad: int, identity: Mapping[str, Any]
    ) -> None:
        self._cache, self._rows, self._pad = cache, rows, pad
        self.context = context
        self.identity = dict(identity)
        """What a position must agree with to be gone on from."""

    def __len__(self) -> int:
        """How many rows there are."""
        return self.counts.rows

    @property
    def counts(self) -> Counts:
        return self._rows.counts

    def steps_per_epoch(self, batch: int) -> int:
        """The last batch of an epoch may hold fewer rows; it is not left out."""
        return -(-len(self) // batch)

    def fill(self, number: int, ids: _Row, labels: _Row, positions: _Row) -> None:
        """Write one row into three arrays of the context's length."""
        at = 0
        bounds = self._rows.bounds
        for piece in range(int(bounds[number]), int(bounds[number + 1])):
            start, length = int(self._rows.starts[piece]), int(self._rows.lengths[piece])
            trained = self._cache.trained[start : start + length]
            end = at + length
            ids[at:end] = self._cache.tokens[start : start + length]
            labels[at:end] = np.where(trained, ids[at:end], IGNORED)
            labels[at] = IGNORED
            positions[at:end] = np.arange(length)
            at = end
        ids[at:] = self._pad
        labels[at:] = IGNORED
        positions[at:] = np.arange(self.context - at)

    def batches(
        self,
        batch: int,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        position: Mapping[str, Any] | None = None,
    ) -> Batches:
        """Batches of `batch` rows: for so many epochs (1 if nothing is said) or so many steps.

        Each epoch has its own order, fixed by the seed. `position` goes on from where another run
        with the same data and settings was.
        """
        if batch < 1:
            raise DataError(f"a batch must hold 1 row or more, got {batch}")
        if epochs is not None and steps is not None:
            raise DataError(f"give epochs or steps, not both: got {epochs} and {steps}")
        if steps is None:
            steps = math.ceil((1 if epochs is None else epochs) * self.steps_per_epoch(batch))
        if steps < 1:
            raise DataError(f"there must be 1 step or more, got {steps}")
        batches = Batches(self, batch, steps=steps, seed=seed, shuffle=shuffle)
        if position is not None:
            batches.go_to(position)
        return batches

    def assemble(self, numbers: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """These rows as a batch."""
        import torch

        shape = (len(numbers), self.context)
        ids, labels, positions = (np.empty(shape, np.int64) for _ in range(3))
        for place, number in enumerate(numbers.tolist()):
            self.fill(number, ids[place], labels[place], positions[place])
        self._cache.let_go()
        if int(ids.max()) >= self._cache.vocabulary:
            raise CacheError(
                str(self._cache.directory),
                f"holds token {int(ids.max())}, beyond the vocabulary of "
                f"{self._cache.vocabulary}; remove the directory to tokenize again",
            )
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


_Row = npt.NDArray[np.int64]


class Batches(Iterator["dict[str, torch.Tensor]"]):
    """Batches in order. What it has handed out is its position, and all its state."""

    def __init__(self, packed: Packed, batch: int, *, steps: int, seed: int, shuffle: bool) -> None:
        self._packed, self._batch = packed, batch
        self._seed, self._shuffle = seed, shuffle
        self.steps = steps
        """Batches in all, those before the position too."""

        self.step = 0
        self._epoch = self._row = 0
        self._order = self._shuffled()

    def __len__(self) -> int:
        """Batches still to come."""
        return max(0, self.steps - self.step)

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.step >= self.steps:
            raise StopIteration
        if self._row >= len(self._packed):
            self._epoch, self._row = self._epoch + 1, 0
            self._order = self._shuffled()
        numbers = self._order[self._row : self._row + self._batch]
        batch = self._packed.assemble(numbers)
        self._row += len(numbers)
        self.step += 1
        return batch

    @property
    def epoch(self) -> float:
        """Passes over the data so far: 1.5 is in the middle of the second."""
        return self._epoch + self._row / len(self._packed)

    @property
    def position(self) -> dict[str, Any]:
        """Where it is, for JSON: the next batch is the one after the last that was handed out."""
        return {
            "version": POSITION_VERSION,
            "epoch": self._epoch,
            "row": self._row,
            "step": self.step,
            **self._settings(),
        }

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go on from a position. PositionError if it is for other data or settings."""
        for field, here in {"version": POSITION_VERSION, **self._settings()}.items():
            if position.get(field) != here:
                raise PositionError(field, saved=position.get(field), here=here)
        places = [position.get(field) for field in ("epoch", "row", "step")]
        for field, place in zip(("epoch", "row", "step"), places, strict=True):
            if not isinstance(place, int) or place < 0:
                raise PositionError(field, saved=place, here="a count of 0 or more")
        self._epoch, self._row, self.step = (int(place or 0) for place in places)
        self._order = self._shuffled()

    def _settings(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, **self._packed.identity}

    def _shuffled(self) -> npt.NDArray[np.int64]:
        if self._shuffle:
            return shuffled(len(self._packed), self._seed, self._epoch, 2)
        return np.arange(len(self._packed), dtype=np.int64)
