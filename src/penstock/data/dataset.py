"""Documents as tokens, ready to be packed. Room: show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.batches import Packed
from penstock.data.errors import DataError, EmptyDataError
from penstock.data.packing import Overlong, pack_rows
from penstock.data.shuffle import Ints, mix
from penstock.data.sources import find_sources
from penstock.data.token_cache import Cache, Tell, default_directory, open_cache
from penstock.data.tokenizer import Tokens


def open_dataset(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    cache_dir: str | Path | None = None,
    skip_bad_lines: bool = False,
    tell: Tell | None = None,
) -> TokenDataset:
    """The tokens of files, directories or hub datasets; from the cache, or tokenized into it now.

    `tell(done, total, what)` is called as it goes on, in bytes of the sources; with zeros for what
    is only to be said. Lines that are no examples are an error unless they are to be skipped.
    """
    tokens = Tokens(tokenizer)
    directory = Path(cache_dir) if cache_dir is not None else default_directory()
    cache = open_cache(
        find_sources(sources),
        tokens,
        directory,
        skip_bad=skip_bad_lines,
        tell=tell if tell is not None else lambda done, total, what: None,
    )
    every = np.arange(cache.state.documents, dtype=np.int64)
    return TokenDataset(cache, tokens, every, part="all")


@dataclass(frozen=True, slots=True)
class Document:
    """One example: its tokens, and which of them are trained."""

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]


class TokenDataset:
    """Documents of a cache: all of them, or one side of a split."""

    def __init__(self, cache: Cache, tokens: Tokens, chosen: Ints, *, part: str) -> None:
        self._cache, self._tokens, self._chosen, self._part = cache, tokens, chosen, part

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: int) -> Document:
        """A document by its place in the data."""
        document = int(self._chosen[number])
        ends = self._cache.documents[:, 0]
        start, end = int(ends[document - 1]) if document else 0, int(ends[document])
        ids = self._cache.tokens[start:end].astype(np.int64)
        return Document(ids, self._cache.trained[start:end].astype(np.bool_))

    @property
    def tokens(self) -> int:
        """Of all documents, whatever the context."""
        ends = self._cache.documents[:, 0]
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        return int((ends - starts)[self._chosen].sum())

    @property
    def targets(self) -> int:
        """Tokens that are trained; the first of a document never is."""
        return int(self._cache.documents[self._chosen, 1].sum())

    @property
    def bad_lines(self) -> tuple[str, ...]:
        """The first of those that were skipped, with file and line number."""
        return self._cache.state.bad_lines

    @property
    def bad_count(self) -> int:
        return self._cache.state.bad

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the data before training on it."""
        open_ends = self._cache.state.left_open
        if not open_ends:
            return ()
        return (
            f"in {open_ends} chats the template's generation marks leave out the token that ends "
            f"the assistant's turn: the model will not learn to stop",
        )

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> str:
        """The text of some tokens, special ones too."""
        return self._tokens.decode([int(token) for token in ids])

    def split(self, fraction: float, *, seed: int = 0) -> tuple[TokenDataset, TokenDataset]:
        """Two datasets, to train on and to hold out. Equal documents go to the same side.

        Which side a document goes to hangs on its tokens and the seed, not on its place.
        """
        if not 0 < fraction < 1:
            raise DataError(f"the share to hold out must lie between 0 and 1, got {fraction}")
        hashes = mix(self._cache.documents[self._chosen, 2].astype(np.uint64), seed, 1)
        count = max(1, round(fraction * len(hashes)))
        held = hashes <= np.sort(hashes)[count - 1]
        if held.all():
            raise EmptyDataError(
                f"{len(hashes)} documents are too few to hold {fraction:g} of them out"
            )
        sides = (("train", ~held), ("held out", held))
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

    def pack(self, context: int, *, overlong: Overlong = "truncate", seed: int = 0) -> Packed:
        """Rows of `context` tokens. `overlong` says what becomes of longer documents."""
        rows = pack_rows(self._cache, self._chosen, context, overlong=overlong, seed=seed)
        identity = {
            "data": self._cache.state.content(),
            "part": self._part,
            "context": context,
            "overlong": overlong,
            "packing_seed": seed,
        }
        return Packed(self._cache, rows, context, pad=self._tokens.pad, identity=identity)
