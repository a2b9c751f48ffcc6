"""Tokenized documents, ready to be packed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.batches import Packed
from penstock.data.errors import CacheError, DataError, EmptyDataError, NoCacheError
from penstock.data.examples import RecordFormat
from penstock.data.packing import pack_rows
from penstock.data.shuffle import Bools, Ints, hash_values
from penstock.data.sources import find_sources
from penstock.data.token_cache import Cache, OnProgress, default_directory, open_cache
from penstock.data.tokenizer import Tokens
from penstock.settings import LARGEST_WEIGHT, Overlong


def open_dataset(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    columns: Mapping[str, str] | None = None,
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenDataset:
    """Tokenize files, directories or Hugging Face datasets, or open their token cache.

    Args:
        sources: Files, directories or dataset IDs.
        tokenizer: A transformers tokenizer.
        columns: Names of columns, such as `{"prompt": "question", "completion": "answer"}`.
        streaming: Read datasets from the Hub as a stream, instead of downloading them first.
        cache_dir: Directory for token caches; by default `~/.cache/penstock/tokens`.
        skip_bad_lines: Skip lines that are not valid examples, instead of raising BadLinesError.
        on_progress: Called as `on_progress(done, total, what)`, in bytes of the sources. If `total`
            is 0, `what` is a message.
    """
    return open_documents(
        sources, tokenizer, RecordFormat(columns or {}), streaming=streaming, cache_dir=cache_dir,
        skip_bad_lines=skip_bad_lines, on_progress=on_progress,
    )  # fmt: skip


def open_documents(
    sources: str | Path | Sequence[str | Path],
    tokenizer: Any,
    format_: RecordFormat,
    *,
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    skip_bad_lines: bool = False,
    on_progress: OnProgress | None = None,
) -> TokenDataset:
    """Tokenize sources in a record format; see `open_dataset`."""
    tokens = Tokens(tokenizer)
    report = on_progress if on_progress is not None else lambda done, total, what: None
    groups = find_sources(sources, streaming=streaming, on_note=lambda text: report(0, 0, text))
    open_in = partial(
        open_cache,
        [source for group in groups for source in group],
        tokens,
        format_=format_,
        skip_bad=skip_bad_lines,
        on_progress=report,
    )
    cache = open_in(Path(cache_dir)) if cache_dir is not None else _open_default(open_in, report)
    all_documents = np.arange(cache.state.documents, dtype=np.int64)
    ends = [0, *cache.state.source_ends]
    last = np.cumsum([len(group) for group in groups])
    known = len(ends) > last[-1]
    ends = [ends[number] for number in last] if known else []
    return TokenDataset(cache, tokens, all_documents, part="all", source_ends=ends)


def _open_default(open_in: Callable[[Path], Cache], report: OnProgress) -> Cache:
    """Open the cache in the user's home or, if that cannot be written, in a temporary directory."""
    try:
        return open_in(default_directory())
    except NoCacheError as problem:
        reason = problem.__cause__
        why = reason.strerror if isinstance(reason, OSError) else reason
        report(
            0,
            0,
            f"note: {problem.path} cannot be written ({why}), so the tokens are kept for this run "
            f"only; --cache DIR keeps them in another directory",
        )
    # The cache is memory-mapped: its disk space is freed when the process ends.
    with tempfile.TemporaryDirectory(prefix="penstock-tokens-") as folder:
        return open_in(Path(folder))


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one example, and which of them are trained."""

    ids: npt.NDArray[np.int64]
    """Token ids."""

    trained: npt.NDArray[np.bool_]
    """Whether each token is trained."""


class TokenDataset:
    """Documents of a token cache: all of them, or one side of a split."""

    def __init__(
        self,
        cache: Cache,
        tokens: Tokens,
        chosen: Ints,
        *,
        part: str,
        source_ends: Sequence[int] = (),
    ) -> None:
        self._cache, self._tokens, self._chosen, self._part = cache, tokens, chosen, part
        self._source_ends = list(source_ends)

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
    def pad(self) -> int:
        """Token that fills a row."""
        return self._tokens.pad

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
        state, notes = self._cache.state, []
        if state.left_open:
            notes.append(
                f"In {state.left_open} chats, the template's generation marks exclude the token "
                f"that ends the assistant's turn: the model will not learn to stop."
            )
        if state.reasoning_dropped:
            notes.append(
                f"In {state.reasoning_dropped} chats, the chat template removes the reasoning "
                f"(<think>) of earlier assistant turns, as it does at inference: it is not "
                f"trained. To train it, end a copy of the chat with each such turn."
            )
        return tuple(notes)

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
                f"the data has too few different documents to hold out a fraction of "
                f"{fraction:g} ({len(hashes)} in all). A text file is one document, unless form "
                f"feeds separate several; --eval-data names other data to evaluate on"
            )
        part = f"{fraction!r} by seed {seed}"
        train = self._choose(self._chosen[~held_out], f"train {part}")
        return train, self._choose(self._chosen[held_out], f"held out {part}")

    def weighted(self, weights: Sequence[float], *, seed: int = 0) -> TokenDataset:
        """Return the dataset with a weight per source: how often an epoch has its documents.

        A weight of 2 has every document twice; a weight of 0.5 has half of the documents, which
        the seed determines.
        """
        if not self._source_ends:  # written by Penstock 0.1
            raise CacheError(
                str(self._cache.directory),
                "does not say which document is from which source; delete the directory to "
                "tokenize again",
            )
        sources = len(self._source_ends)
        if len(weights) != sources or not all(0 <= w <= LARGEST_WEIGHT for w in weights):
            raise DataError(
                f"the weights must be {sources} numbers from 0 to {LARGEST_WEIGHT}, one for each "
                f"source; "
                f"got {', '.join(f'{weight:g}' for weight in weights)}"
            )
        origins = np.searchsorted(self._source_ends, self._chosen, side="right")
        parts = []
        for source, weight in enumerate(weights):
            documents = self._chosen[origins == source]
            order = documents[np.argsort(hash_values(documents.astype(np.uint64), seed, 3))]
            whole, share = divmod(weight, 1)
            if weight and not round(weight * len(documents)):
                raise DataError(
                    f"a weight of {weight:g} leaves none of the {len(documents)} documents of "
                    f"source {source + 1}; split its documents, or give it a larger weight"
                )
            parts += [documents] * int(whole) + [order[: round(share * len(order))]]
        chosen = np.concatenate(parts)
        if not len(chosen):
            raise EmptyDataError("the weights of the sources leave no document")
        listed = ", ".join(f"{weight!r}" for weight in weights)
        return self._choose(chosen, f"weights {listed} by seed {seed}")

    def _choose(self, chosen: Ints, part: str) -> TokenDataset:
        return TokenDataset(
            self._cache, self._tokens, chosen, part=f"{self._part}, {part}",
            source_ends=self._source_ends,
        )  # fmt: skip

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
