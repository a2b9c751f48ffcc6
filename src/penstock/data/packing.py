"""Documents into rows of the context's length. Room: show.

A row holds whole documents. One that is too long is cut, left out or split first, as the user says;
what has no target left is left out too. The best-fitting row is found for the longest document
first, within a window of documents, so that memory is bounded and little is padding.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from penstock.data.errors import DataError, EmptyDataError
from penstock.data.shuffle import Ints, shuffled
from penstock.data.token_cache import Cache

Overlong = Literal["truncate", "drop", "split"]
WINDOW = 1 << 16
"""Pieces that are packed together. More would fill the rows hardly better."""

LET_GO = 1 << 10
"""Pieces whose masks are looked at before their pages are given back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What packing did."""

    documents: int
    """All there were."""

    truncated: int
    dropped: int
    split: int
    untrained: int
    """Pieces left out because cutting left no target in them."""

    rows: int
    tokens: int
    """In the rows, padding not counted."""

    targets: int
    """Tokens that are predicted and trained."""

    padding: int

    @property
    def padding_share(self) -> float:
        return self.padding / max(1, self.padding + self.tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which tokens lie in which row: pieces in row order, and where each row's pieces begin."""

    starts: Ints
    lengths: Ints
    bounds: Ints
    counts: Counts


def pack_rows(cache: Cache, chosen: Ints, context: int, *, overlong: Overlong, seed: int) -> Rows:
    """Rows of the chosen documents. The same arguments give the same rows."""
    if context < 2:
        raise DataError(f"a context of {context} leaves nothing to predict; it must be 2 or more")
    if overlong not in get_args(Overlong):
        raise DataError(f"overlong can be {', '.join(get_args(Overlong))}; got {overlong!r}")
    pieces, too_long = _pieces(cache, chosen, context, overlong)
    useful = pieces[2] > 0
    starts, lengths, targets = pieces[:, useful]
    if not len(starts):
        raise EmptyDataError(
            f"nothing is left to train on: of {len(chosen)} documents, {too_long} are longer than "
            f"the context of {context} and the rest have no trained token; raise --context or "
            f"choose another --overlong than {overlong}"
        )
    order, bounds = _assign(lengths, context, seed)
    counts = Counts(
        documents=len(chosen),
        truncated=too_long if overlong == "truncate" else 0,
        dropped=too_long if overlong == "drop" else 0,
        split=too_long if overlong == "split" else 0,
        untrained=int((~useful).sum()),
        rows=len(bounds) - 1,
        tokens=int(lengths.sum()),
        targets=int(targets.sum()),
        padding=(len(bounds) - 1) * context - int(lengths.sum()),
    )
    return Rows(starts[order], lengths[order], bounds, counts)


def _pieces(cache: Cache, chosen: Ints, context: int, overlong: Overlong) -> tuple[Ints, int]:
    """Start, length and targets of all that may go into rows; how many documents are too long."""
    ends = cache.documents[:, 0]
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[chosen]
    lengths = ends[chosen] - starts
    is_long = lengths > context
    fits = ~is_long
    pieces = np.stack([starts[fits], lengths[fits], cache.documents[chosen[fits], 1]])
    if overlong != "drop":
        cut = _cut(cache, starts[is_long], lengths[is_long], context, overlong)
        pieces = np.concatenate([pieces, cut], axis=1)
    return pieces, int(is_long.sum())


def _cut(cache: Cache, starts: Ints, lengths: Ints, context: int, overlong: Overlong) -> Ints:
    """The pieces of documents that are too long: start, length, targets."""
    whole = np.full_like(lengths, context) if overlong == "truncate" else lengths
    count = -(-whole // context)
    first = np.cumsum(count) - count
    offsets = (np.arange(int(count.sum())) - np.repeat(first, count)) * context
    sizes = np.minimum(context, np.repeat(whole, count) - offsets)
    places = np.repeat(starts, count) + offsets
    targets = np.zeros_like(places)
    for number, (at, size) in enumerate(zip(places, sizes, strict=True)):
        targets[number] = cache.trained[at + 1 : at + size].sum()
        if number % LET_GO == 0:
            cache.let_go()
    return np.stack([places, sizes, targets])


def _assign(lengths: Ints, context: int, seed: int) -> tuple[Ints, Ints]:
    """The pieces' order, row after row, and where each row begins in it."""
    order = shuffled(len(lengths), seed)
    placed: list[Ints] = []
    sizes: list[Ints] = []
    for at in range(0, len(order), WINDOW):
        window = order[at : at + WINDOW]
        window = window[np.argsort(-lengths[window], kind="stable")]
        rows = np.array(best_fit(lengths[window].tolist(), context), np.int64)
        placed.append(window[np.argsort(rows, kind="stable")])
        sizes.append(np.bincount(rows))
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return np.concatenate(placed), bounds


def best_fit(lengths: list[int], room: int) -> list[int]:
    """The row of each piece: where it leaves the least room, or a new one."""
    rows: list[int] = []
    spaces: list[tuple[int, int]] = []  # room left in a row, and the row; sorted
    made = 0
    for length in lengths:
        at = bisect.bisect_left(spaces, (length, 0))
        if at < len(spaces):
            space, row = spaces.pop(at)
        else:
            space, row, made = room, made, made + 1
        rows.append(row)
        if space > length:
            bisect.insort(spaces, (space - length, row))
    return rows
