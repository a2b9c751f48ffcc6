"""Pack documents into rows as long as the context.

A row contains whole documents. A document that is longer than the context is truncated, dropped or
split first; by default, plain texts are split and all others truncated. Pieces without any trained
token are skipped. Packing is best-fit decreasing within a window of documents, so that memory is
bounded and padding is small.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import get_args

import numpy as np

from penstock.data.errors import DataError, EmptyDataError
from penstock.data.shuffle import Bools, Ints, shuffled_indices
from penstock.data.token_cache import Cache
from penstock.settings import Overlong

WINDOW = 1 << 16
"""Number of pieces that are packed together. A larger window would hardly reduce padding."""

RELEASE_INTERVAL = 1 << 10
"""Number of pieces whose masks are read before their pages are released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Numbers of documents, tokens and rows after packing."""

    documents: int
    """Number of documents before packing."""

    truncated: int
    """Number of truncated documents."""

    dropped: int
    """Number of dropped documents."""

    split: int
    """Number of split documents."""

    cut: int
    """Number of trained tokens that truncated and dropped documents lost."""

    untrained: int
    """Number of pieces skipped because they have no trained token."""

    rows: int
    """Number of rows."""

    tokens: int
    """Number of tokens in the rows, without padding."""

    targets: int
    """Number of tokens that are predicted and trained."""

    padding: int
    """Number of padding tokens."""

    @property
    def cut_share(self) -> float:
        """Share of the trained tokens that truncated and dropped documents lost."""
        return self.cut / max(1, self.cut + self.targets)

    @property
    def padding_share(self) -> float:
        """Share of padding in the rows."""
        return self.padding / max(1, self.padding + self.tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """The pieces of all rows, in row order."""

    starts: Ints
    """Index in the cache of the first token of each piece."""

    lengths: Ints
    """Number of tokens of each piece."""

    bounds: Ints
    """Index of the first piece of each row, and the number of pieces."""

    counts: Counts
    """Numbers of documents, tokens and rows."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What becomes of the documents before they are assigned to rows."""

    table: Ints
    """Start, length and targets of each piece."""

    truncated: int
    dropped: int
    split: int
    cut: int
    """Number of trained tokens that were cut."""


def pack_rows(
    cache: Cache,
    chosen: Ints,
    context: int,
    *,
    overlong: Overlong,
    seed: int,
    texts: Bools,
    one_per_row: bool = False,
) -> Rows:
    """Pack the chosen documents into rows. The same arguments give the same rows.

    `texts` says which of the chosen documents are plain texts, for an `overlong` of "auto".
    """
    if context < 2:
        raise DataError(f"a context of {context} leaves nothing to predict; it must be 2 or more")
    if overlong not in get_args(Overlong):
        raise DataError(
            f"overlong must be one of {', '.join(get_args(Overlong))}; got {overlong!r}"
        )
    pieces = _cut_documents(cache, chosen, context, overlong, texts)
    useful = pieces.table[2] > 0
    starts, lengths, targets = pieces.table[:, useful]
    if not len(starts):
        too_long = pieces.truncated + pieces.dropped + pieces.split
        raise EmptyDataError(
            f"there is nothing to train on: of {len(chosen)} documents, {too_long} are longer than "
            f"the context of {context} and the others have no trained token; increase --context, "
            f"or choose another --overlong than {overlong}"
        )
    if one_per_row:
        order, bounds = shuffled_indices(len(lengths), seed), np.arange(len(lengths) + 1)
    else:
        order, bounds = _assign(lengths, context, seed)
    counts = Counts(
        documents=len(chosen),
        truncated=pieces.truncated,
        dropped=pieces.dropped,
        split=pieces.split,
        cut=pieces.cut,
        untrained=int((~useful).sum()),
        rows=len(bounds) - 1,
        tokens=int(lengths.sum()),
        targets=int(targets.sum()),
        padding=(len(bounds) - 1) * context - int(lengths.sum()),
    )
    return Rows(starts[order], lengths[order], bounds, counts)


def _cut_documents(
    cache: Cache, chosen: Ints, context: int, overlong: Overlong, texts: Bools
) -> _Pieces:
    """Truncate, drop or split the documents that are longer than the context."""
    ends = cache.documents[:, 0]
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[chosen]
    lengths = ends[chosen] - starts
    targets = cache.documents[chosen, 1]
    is_long = lengths > context
    auto = overlong == "auto"
    split = is_long & (texts if auto else overlong == "split")
    truncated = is_long & (~texts if auto else overlong == "truncate")
    dropped = is_long & (overlong == "drop")
    fits = ~is_long
    parts = [np.stack([starts[fits], lengths[fits], targets[fits]])]
    for side, kept in ((truncated, np.minimum(lengths, context)), (split, lengths)):
        parts.append(_shorten(cache, starts[side], kept[side], context))
    return _Pieces(
        np.concatenate(parts, axis=1),
        truncated=int(truncated.sum()),
        dropped=int(dropped.sum()),
        split=int(split.sum()),
        cut=int(targets[truncated | dropped].sum() - parts[1][2].sum()),
    )


def _shorten(cache: Cache, starts: Ints, kept: Ints, context: int) -> Ints:
    """Return start, length and targets of the pieces of each document's first `kept` tokens."""
    count = -(-kept // context)
    first = np.cumsum(count) - count
    offsets = (np.arange(int(count.sum())) - np.repeat(first, count)) * context
    sizes = np.minimum(context, np.repeat(kept, count) - offsets)
    piece_starts = np.repeat(starts, count) + offsets
    targets = np.zeros_like(piece_starts)
    for number, (at, size) in enumerate(zip(piece_starts, sizes, strict=True)):
        # The first token of a piece is never a target: nothing precedes it.
        targets[number] = cache.trained[at + 1 : at + size].sum()
        if number % RELEASE_INTERVAL == 0:
            cache.release_pages()
    return np.stack([piece_starts, sizes, targets])


def _assign(lengths: Ints, context: int, seed: int) -> tuple[Ints, Ints]:
    """Return the pieces in row order, and the index of the first piece of each row."""
    order = shuffled_indices(len(lengths), seed)
    row_order: list[Ints] = []
    sizes: list[Ints] = []
    for at in range(0, len(order), WINDOW):
        window = order[at : at + WINDOW]
        window = window[np.argsort(-lengths[window], kind="stable")]
        rows = np.array(best_fit(lengths[window].tolist(), context), np.int64)
        row_order.append(window[np.argsort(rows, kind="stable")])
        sizes.append(np.bincount(rows))
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return np.concatenate(row_order), bounds


def best_fit(lengths: list[int], context: int) -> list[int]:
    """Return the row of each piece: the one with the least space that fits, or a new one."""
    rows: list[int] = []
    spaces: list[tuple[int, int]] = []  # (space left, row), sorted
    num_rows = 0
    for length in lengths:
        at = bisect.bisect_left(spaces, (length, 0))
        if at < len(spaces):
            space, row = spaces.pop(at)
        else:
            space, row, num_rows = context, num_rows, num_rows + 1
        rows.append(row)
        if space > length:
            bisect.insort(spaces, (space - length, row))
    return rows
