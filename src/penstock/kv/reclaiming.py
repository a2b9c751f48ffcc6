"""Pages that nobody needs go to those who do. Room: hold.

Unmapping waits for the device, so it happens when pages are wanted and not when they are left.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.kv.errors import CacheFull, NoSlot
from penstock.kv.slots import Slot

if TYPE_CHECKING:
    from penstock.kv.keeper import Keeper


def ensure_free(keeper: Keeper, wanted: int) -> None:
    """Let the pool have `wanted` free pages, or change nothing and raise CacheFull."""
    pool = keeper.pool
    missing = wanted - pool.free
    if missing <= 0:
        return
    spare = _spare(keeper)
    left = Counter(page for slot, need in spare for page in slot.pages[need:])
    # One that several slots share is free when none of those that hold it needs it.
    there = sum(pool.holders(page) == slots for page, slots in left.items())
    if there < missing:
        raise CacheFull(
            what="growing",
            wanted=wanted,
            free=pool.free + there,
            budget=pool.total,
            page=keeper.layout.page_nbytes,
        )
    for slot, need in spare:
        while wanted > pool.free and len(slot.pages) > need:
            least = max(need, len(slot.pages) - (wanted - pool.free))
            pool.give(keeper.table.truncate(slot, least))


def _spare(keeper: Keeper) -> list[tuple[Slot, int]]:
    """Slots with pages that nobody needs, each with how many it needs; kept ones first, then what
    is ahead."""
    kept, ahead = [], []
    keeper.grower.still(keeper.table.slots)
    for slot in keeper.table.slots:
        if slot.sequence is None:
            kept.append((slot, 0))
        else:
            ahead.append((slot, keeper.layout.pages_for(slot.sequence.prepared)))
    spare = [*reversed(kept), *reversed(ahead)]
    return [(slot, need) for slot, need in spare if len(slot.pages) > need]


def best_fit(keeper: Keeper, wanted: int) -> Slot:
    """The free slot whose kept pages fit best: the fewest that suffice, else the most."""
    slots = keeper.table.slots
    empty = [slot for slot in slots if slot.sequence is None]
    if not empty:
        raise NoSlot(slots=len(slots))
    enough = [slot for slot in empty if len(slot.pages) >= wanted]
    if enough:
        return min(enough, key=lambda slot: len(slot.pages))
    return max(empty, key=lambda slot: len(slot.pages))
