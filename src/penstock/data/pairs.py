"""Preference pairs: a chosen and a rejected answer to the same prompt, for losses such as DPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.data.batches import IGNORE_INDEX
from penstock.data.dataset import Document, TokenDataset, open_documents
from penstock.data.errors import DataError
from penstock.data.examples import RecordFormat
from penstock.data.shuffle import shuffled_indices
from penstock.data.token_cache import OnProgress

if TYPE_CHECKING:
    import torch


def open_pairs(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | None = None,
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> PairDataset:
    """Tokenize preference pairs: records with `chosen`, `rejected` and, mostly, `prompt`.

    The values are strings or lists of messages. Without a prompt, the messages with which both
    chats begin are the prompt. See `open_dataset` for the arguments.
    """
    documents = open_documents(
        sources, tokenizer, RecordFormat(columns or {}, pairs=True), streaming=streaming,
        cache_dir=cache_dir, skip_bad_lines=skip_bad_lines, on_progress=on_progress,
    )  # fmt: skip
    return PairDataset(documents)


class PairDataset:
    """Pairs of documents. In each, the answer is trained and the prompt is not."""

    def __init__(self, documents: TokenDataset) -> None:
        # The cache has the chosen and the rejected document of each pair, one after the other.
        self.documents = documents

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.documents) // 2

    def __getitem__(self, number: int) -> tuple[Document, Document]:
        """Return the chosen and the rejected document of a pair."""
        if not 0 <= number < len(self):
            raise IndexError(f"pair {number} of {len(self)}")
        return self.documents[2 * number], self.documents[2 * number + 1]

    def batches(
        self, batch: int, *, context: int, epochs: int = 1, seed: int = 0, shuffle: bool = True
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches of pairs: `batch` rows with chosen documents, then the rejected ones.

        Each row has one document and padding, as tensors of `2 * batch` rows of `context` tokens:
        `input_ids`, `labels` (-100 where nothing is trained) and `position_ids`. Pairs that are
        longer than the context are an error: a truncated answer would be compared with a whole one.
        """
        longest = int(self.documents.lengths.max())
        if longest > context:
            raise DataError(f"the longest pair has {longest} tokens, more than the {context}")
        for epoch in range(epochs):
            order = np.arange(len(self), dtype=np.int64)
            if shuffle:
                order = shuffled_indices(len(self), seed, epoch, 4)
            for at in range(0, len(order), batch):
                yield self._assemble(order[at : at + batch], context)

    def _assemble(self, numbers: npt.NDArray[np.int64], context: int) -> dict[str, torch.Tensor]:
        import torch

        sides = [self[number] for number in numbers.tolist()]
        documents = [pair[0] for pair in sides] + [pair[1] for pair in sides]
        shape = (len(documents), context)
        ids = np.full(shape, self.documents.pad, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        positions = np.empty(shape, np.int64)
        for row, document in enumerate(documents):
            length = len(document.ids)
            ids[row, :length] = document.ids
            labels[row, 1:length] = np.where(document.trained, document.ids, IGNORE_INDEX)[1:]
            positions[row, :length] = np.arange(length)
            positions[row, length:] = np.arange(context - length)  # padding is another document
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
