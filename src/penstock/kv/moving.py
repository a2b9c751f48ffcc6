"""Sequences change rows by remapping, without a copy. Room: hold."""

from __future__ import annotations

from collections.abc import Sequence as Listed

from penstock.kv.errors import BatchError
from penstock.kv.keeper import Keeper
from penstock.kv.slots import Sequence, Slot
from penstock.kv.space import Page


def line_up(keeper: Keeper, sequences: Listed[Sequence]) -> int:
    """Put sequences into neighbouring rows, in their order; returns the first row.

    Sequences that lie so already, wherever that is, cost nothing. Else the run of rows is taken for
    which the fewest pages move. What was in those rows goes where the newcomers came from.
    """
    slots = [keeper.slot_of(sequence) for sequence in sequences]
    if len(set(slots)) < len(slots):
        raise BatchError("a sequence is in the batch twice; each row needs one of its own")
    first = slots[0].index
    if all(slot.index == first + i for i, slot in enumerate(slots)):
        return first
    table = keeper.table.slots
    keeper.grower.still(table)
    starts = range(len(table) - len(slots) + 1)
    first = min(starts, key=lambda start: _cost(slots, table[start : start + len(slots)]))
    _exchange(keeper, dict(zip(table[first : first + len(slots)], slots, strict=True)))
    return first


def _cost(slots: list[Slot], targets: list[Slot]) -> int:
    """Pages that would be mapped anew if `slots` came to lie in `targets`."""
    comers = sum(len(s.pages) for s, t in zip(slots, targets, strict=True) if s is not t)
    return comers + sum(len(t.pages) for t in targets if t not in slots)


def _exchange(keeper: Keeper, source: dict[Slot, Slot]) -> None:
    """Each key gets what its value has; what that displaces goes to the rows left empty."""
    displaced = [target for target in source if target not in source.values()]
    emptied = [slot for slot in source.values() if slot not in source]
    source = source | dict(zip(emptied, displaced, strict=True))
    source = {target: slot for target, slot in source.items() if target is not slot}
    sequences = {target: slot.sequence for target, slot in source.items()}
    keeper.table.rearrange({target: slot.pages for target, slot in source.items()})
    for target, sequence in sequences.items():
        target.sequence = sequence
        if sequence is not None:
            sequence._slot = target


def branch(keeper: Keeper, rows: list[Sequence], sources: list[int]) -> list[Sequence]:
    """New rows, the i-th a continuation of old row `sources[i]`: beams, repeats, selections.

    Pages are shared and not copied, until one of the holders writes.
    """
    with keeper.whole():
        contents = [_live_pages(keeper, rows[source]) for source in sources]
        lengths = [rows[source].length for source in sources]
        fresh = [keeper.admit(None, 0) for _ in sources[len(rows) :]]
        for extra in rows[len(sources) :]:
            keeper.finish(extra)
        new = [*rows[: len(sources)], *fresh]
        slots = [keeper.slot_of(sequence) for sequence in new]
        keeper.grower.still(slots)
        wanted = {
            slot: _with_own(keeper, slot, pages)
            for slot, pages in zip(slots, contents, strict=True)
        }
        before = [page for slot in slots for page in slot.pages]
        for pages in wanted.values():
            keeper.pool.share(pages)
        keeper.table.rearrange(wanted)
        keeper.pool.give(before)
        for sequence, length in zip(new, lengths, strict=True):
            sequence.length = sequence.prepared = length
        return new


def _live_pages(keeper: Keeper, sequence: Sequence) -> list[Page]:
    need = keeper.layout.pages_for(sequence.length)
    return keeper.slot_of(sequence).pages[:need]


def _with_own(keeper: Keeper, slot: Slot, pages: list[Page]) -> list[Page]:
    """A branch's pages, and behind them what the row had mapped ahead for itself."""
    ahead = [p for p in slot.pages[len(pages) :] if keeper.pool.holders(p) == 1 and p not in pages]
    return [*pages, *ahead]


def cover_gaps(keeper: Keeper, sequences: Listed[Sequence]) -> None:
    """Make every row readable as far as the longest will reach."""
    reach = keeper.layout.pages_for(max(sequence.prepared for sequence in sequences))
    slots = [keeper.slot_of(sequence) for sequence in sequences]
    if all(len(slot.pages) + slot.blanks >= reach for slot in slots):
        return
    blank = keeper.blank()
    keeper.grower.still(slots)
    for slot in slots:
        keeper.table.cover(slot, reach, blank)
