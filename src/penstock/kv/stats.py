"""What a cache holds, counted. Room: hold."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kv.keeper import Keeper
from penstock.kv.space import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Pages and bytes at one moment: `free + live + ahead + kept + others == pages_total`.
    A page that several sequences share counts once."""

    pages_total: int
    """What the budget allows."""
    free: int
    """Taken by nobody."""
    live: int
    """Holding tokens of a sequence."""
    ahead: int
    """Mapped behind a live sequence, before it needs them."""
    kept: int
    """Left by sequences that are gone, for the next one or for whoever needs them."""
    blank: int
    """1 once a padded batch was read: the page that stands for padding, beside the budget."""
    others: int
    """Held by other users of the pool."""
    shared: int
    """Of `live`, those that hold tokens of more than one sequence."""
    page_nbytes: int
    needed_bytes: int
    """What the tokens take, to the byte."""
    grown_ahead: int
    """Pages that were mapped in the background, ever."""
    grown_inline: int
    """Pages that a `prepare` had to wait for, ever."""

    @property
    def mapped_bytes(self) -> int:
        return (self.live + self.ahead + self.kept) * self.page_nbytes

    @property
    def waste(self) -> int:
        """Bytes of live pages that hold no token: less than a page per sequence."""
        return self.live * self.page_nbytes - self.needed_bytes


def count(keeper: Keeper) -> Stats:
    with keeper.lock:
        layout, pool = keeper.layout, keeper.pool
        filled: dict[Page, int] = {}
        sharers: dict[Page, int] = {}
        mapped: set[Page] = set()
        behind: set[Page] = set()
        growing = 0
        for slot in keeper.table.slots:
            mapped.update(slot.pages)
            growing += slot.growing
            if slot.sequence is None:
                continue
            nbytes = slot.sequence.length * layout.token_nbytes
            need = layout.pages_for(slot.sequence.length)
            behind.update(slot.pages[need:])
            for i, page in enumerate(slot.pages[:need]):
                used = min(layout.page_nbytes, nbytes - i * layout.page_nbytes)
                filled[page] = max(filled.get(page, 0), used)
                sharers[page] = sharers.get(page, 0) + 1
        live = set(filled)
        ahead = len(behind - live) + growing
        kept = len(mapped - behind - live)
        return Stats(
            pages_total=pool.total,
            free=pool.free,
            live=len(live),
            ahead=ahead,
            kept=kept,
            blank=int(keeper.has_blank),
            others=pool.used - len(live) - ahead - kept,
            shared=sum(n > 1 for n in sharers.values()),
            page_nbytes=layout.page_nbytes,
            needed_bytes=sum(filled.values()),
            grown_ahead=keeper.grower.mapped,
            grown_inline=keeper.mapped_inline,
        )
