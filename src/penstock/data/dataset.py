"""Tokenized documents, ready to be packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.batches import Packed
from penstock.data.errors import DataError, EmptyDataError
from penstock.data.packing import pack_rows
from penstock.data.shuffle import Bools, Ints, hash_values
from penstock.data.sources import find_sources
from penstock.data.token_cache import Cache, OnProgress, default_directory, open_cache
from penstock.data.tokenizer import Tokens
from penstock.settings import Overlong


def open_dataset(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    cache_dir: str | Path | None = None,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenDataset:
    """Tokenize files, directories or Hugging Face datasets, or open their token cache.

    Args:
        sources: Files, directories or dataset ids.
        tokenizer: A transformers tokenizer.
        cache_dir: Directory for token caches; by default `~/.cache/penstock/tokens`.
        skip_bad_lines: Skip lines that are not valid examples, instead of raising BadLinesError.
        on_progress: Called as `on_progress(done, total, what)`, in bytes of the sources. If `total`
            is 0, `what` is a message.
    """
    tokens = Tokens(tokenizer)
    directory = Path(cache_dir) if cache_dir is not None else default_directory()
    cache = open_cache(
        find_sources(sources),
        tokens,
        directory,
        skip_bad=skip_bad_lines,
        on_progress=on_progress if on_progress is not None else lambda done, total, what: None,
    )
    all_documents = np.arange(cache.state.documents, dtype=np.int64)
    return TokenDataset(cache, tokens, all_documents, part="all")


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one example, and which of them are trained."""

    ids: npt.NDArray[np.int64]
    """Token ids."""

    trained: npt.NDArray[np.bool_]
    """Whether each token is trained."""


class TokenDataset:
    """Documents of a token cache: all of them, or one side of a split."""

    def __init__(self, cache: Cache, tokens: Tokens, chosen: Ints, *, part: str) -> None:
        self._cache, self._tokens, self._chosen, self._part = cache, tokens, chosen, part

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: int) -> Document:
        """Return a document by its index."""
        document = int(self._chosen[number])
        ends = self._cache.documents[:, 0]
        start, end = int(ends[document - 1]) if document else 0, int(ends[document])
        ids = self._cache.tokens[start:end].astype(np.int64)
        return Document(ids, self._cache.trained[start:end].astype(np.bool_))

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> Ints:
        """Number of tokens of each document."""
        ends = self._cache.documents[:, 0]
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        lengths: Ints = (ends - starts)[self._chosen]
        return lengths

    @property
    def plain_texts(self) -> Bools:
        """Whether each document is a plain text: one that is trained from its first word on.

        Such a document has no prompt, so every piece of it can be trained.
        """
        # The first token is never a target, and the tokenizer's opening tokens are not trained.
        untrained = max(1, len(self._tokens.opening))
        targets: Ints = self._cache.documents[self._chosen, 1]
        return np.asarray(targets >= self.lengths - untrained)

    @property
    def targets(self) -> int:
        """Number of trained tokens. The first token of a document is never trained."""
        return int(self._cache.documents[self._chosen, 1].sum())

    @property
    def bad_lines(self) -> tuple[str, ...]:
        """The first skipped lines, with file and line number."""
        return self._cache.state.bad_lines

    @property
    def bad_count(self) -> int:
        """Number of skipped lines."""
        return self._cache.state.bad

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about the data that a user should read before training."""
        open_ends = self._cache.state.left_open
        if not open_ends:
            return ()
        return (
            f"In {open_ends} chats, the template's generation marks exclude the token that ends "
            "the assistant's turn: the model will not learn to stop.",
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> str:
        """Decode tokens, including special tokens, to text."""
        return self._tokens.decode([int(token) for token in ids])

    def split(self, fraction: float, *, seed: int = 0) -> tuple[TokenDataset, TokenDataset]:
        """Split into a dataset to train on and one to hold out.

        The side of a document depends only on its tokens and the seed, not on its position, so
        equal documents are on the same side.
        """
        if not 0 < fraction < 1:
            raise DataError(f"the fraction to hold out must be between 0 and 1, got {fraction}")
        hashes = hash_values(self._cache.documents[self._chosen, 2].astype(np.uint64), seed, 1)
        count = max(1, round(fraction * len(hashes)))
        held_out = hashes <= np.sort(hashes)[count - 1]
        if held_out.all():
            raise EmptyDataError(
                f"{len(hashes)} documents are too few to hold out a fraction of {fraction:g}"
            )
        sides = (("train", ~held_out), ("held out", held_out))
        train, out = (
            TokenDataset(
                self._cache,
                self._tokens,
                self._chosen[side],
                part=f"{self._part}, {name} {fraction!r} by seed {seed}",
            )
            for name, side in sides
        )
        return train, out

    def pack(
        self,
        context: int,
        *,
        overlong: Overlong = "auto",
        seed: int = 0,
        one_per_row: bool = False,
    ) -> Packed:
        """Pack the documents into rows of `context` tokens.

        `overlong` decides what happens to longer documents: "truncate" keeps the first `context`
        tokens, "drop" skips them, "split" makes several documents of them, and "auto" splits plain
        texts and truncates all others. With `one_per_row`,
        every row has one document and padding, for models that would mix documents of a row.
        """
        rows = pack_rows(
            self._cache, self._chosen, context, overlong=overlong, seed=seed,
            texts=self.plain_texts, one_per_row=one_per_row,
        )  # fmt: skip
        identity = {
            "data": self._cache.state.content(),
            "part": self._part,
            "context": context,
            "overlong": overlong,
            "packing_seed": seed,
        }
        if one_per_row:  # positions that were saved before it existed stay valid
            identity["one_per_row"] = True
        return Packed(self._cache, rows, context, pad=self._tokens.pad, identity=identity)
