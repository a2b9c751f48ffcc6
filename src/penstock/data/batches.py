"""Assemble packed rows into batches, from any position.

A batch is a dict of CPU tensors: `input_ids`, `labels` (not shifted; -100 for tokens that are not
trained) and `position_ids`. The position ids start at 0 with each document, which is how the engine
recognizes its start. Padding is a separate document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.data.errors import CacheError, DataError, PositionError
from penstock.data.packing import Counts, Rows
from penstock.data.shuffle import shuffled_indices
from penstock.data.token_cache import Cache

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of tokens that are not trained, as in torch's cross entropy."""

POSITION_VERSION = 1
"""Version of the saved position."""

_Row = npt.NDArray[np.int64]


class Packed:
    """Rows of equal length. Each row contains whole documents and padding."""

    def __init__(
        self, cache: Cache, rows: Rows, context: int, *, pad: int, identity: Mapping[str, Any]
    ) -> None:
        self._cache, self._rows, self._pad = cache, rows, pad
        self.context = context
        self.identity = dict(identity)
        """Values that a saved position must match to be resumed from."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.counts.rows

    @property
    def counts(self) -> Counts:
        """Numbers of documents, tokens and rows."""
        return self._rows.counts

    def steps_per_epoch(self, batch: int) -> int:
        """Return the number of batches per epoch, including a smaller last one."""
        return -(-len(self) // batch)

    def fill(self, number: int, ids: _Row, labels: _Row, positions: _Row) -> None:
        """Write one row into three arrays as long as the context."""
        at = 0
        bounds = self._rows.bounds
        for piece in range(int(bounds[number]), int(bounds[number + 1])):
            start, length = int(self._rows.starts[piece]), int(self._rows.lengths[piece])
            trained = self._cache.trained[start : start + length]
            end = at + length
            ids[at:end] = self._cache.tokens[start : start + length]
            labels[at:end] = np.where(trained, ids[at:end], IGNORE_INDEX)
            labels[at] = IGNORE_INDEX
            positions[at:end] = np.arange(length)
            at = end
        ids[at:] = self._pad
        labels[at:] = IGNORE_INDEX
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
        """Return batches of `batch` rows for a number of epochs (1 by default) or of steps.

        Each epoch has its own order, which the seed determines. With `position`, continue where
        another run with the same data and settings stopped.
        """
        if batch < 1:
            raise DataError(f"the batch size must be 1 or more, got {batch}")
        if epochs is not None and steps is not None:
            raise DataError(f"epochs and steps cannot both be given, got {epochs} and {steps}")
        if steps is None:
            steps = math.ceil((1 if epochs is None else epochs) * self.steps_per_epoch(batch))
        if steps < 1:
            raise DataError(f"the number of steps must be 1 or more, got {steps}")
        batches = Batches(self, batch, steps=steps, seed=seed, shuffle=shuffle)
        if position is not None:
            batches.seek(position)
        return batches

    def assemble(self, numbers: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return these rows as a batch."""
        import torch

        shape = (len(numbers), self.context)
        ids, labels, positions = (np.empty(shape, np.int64) for _ in range(3))
        for place, number in enumerate(numbers.tolist()):
            self.fill(number, ids[place], labels[place], positions[place])
        self._cache.release_pages()
        if int(ids.max()) >= self._cache.vocabulary:
            raise CacheError(
                str(self._cache.directory),
                f"contains token {int(ids.max())}, beyond the vocabulary of "
                f"{self._cache.vocabulary}; delete the directory to tokenize again",
            )
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Batches(Iterator["dict[str, torch.Tensor]"]):
    """An iterator over batches. Its position is its only state."""

    def __init__(self, packed: Packed, batch: int, *, steps: int, seed: int, shuffle: bool) -> None:
        self._packed, self._batch = packed, batch
        self._seed, self._shuffle = seed, shuffle
        self.steps = steps
        """Total number of batches, including those before the position."""

        self.step = 0
        """Number of batches returned so far."""

        self._epoch = self._row = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        return max(0, self.steps - self.step)

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.step >= self.steps:
            raise StopIteration
        if self._row >= len(self._packed):
            self._epoch, self._row = self._epoch + 1, 0
            self._order = self._epoch_order()
        numbers = self._order[self._row : self._row + self._batch]
        batch = self._packed.assemble(numbers)
        self._row += len(numbers)
        self.step += 1
        return batch

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far: 1.5 is in the middle of the second pass."""
        return self._epoch + self._row / len(self._packed)

    @property
    def position(self) -> dict[str, Any]:
        """Position of the next batch, as values for JSON."""
        return {
            "version": POSITION_VERSION,
            "epoch": self._epoch,
            "row": self._row,
            "step": self.step,
            **self._settings(),
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue from a position. Raises PositionError if it is for other data or settings."""
        if not isinstance(position, Mapping):
            raise PositionError("position", saved=position, here="an object {...}")
        for field, here in {"version": POSITION_VERSION, **self._settings()}.items():
            if position.get(field) != here:
                raise PositionError(field, saved=position.get(field), here=here)
        values = [position.get(field) for field in ("epoch", "row", "step")]
        for field, value in zip(("epoch", "row", "step"), values, strict=True):
            if not isinstance(value, int) or not 0 <= value < 1 << 63:
                raise PositionError(field, saved=value, here="a number from 0 to 2**63 - 1")
        self._epoch, self._row, self.step = (int(value or 0) for value in values)
        self._order = self._epoch_order()

    def _settings(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, **self._packed.identity}

    def _epoch_order(self) -> npt.NDArray[np.int64]:
        if self._shuffle:
            return shuffled_indices(len(self._packed), self._seed, self._epoch, 2)
        return np.arange(len(self._packed), dtype=np.int64)
