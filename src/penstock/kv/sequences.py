"""Sequences come, grow, share, move, leave. Room: hold.

Note on zeros. A padded kernel multiplies what lies behind a short row by zero, and zero times a
stray NaN is NaN. So a page is zeroed whenever it comes to another sequence: behind a row's end
there is nothing but zeros and what that sequence itself once wrote.

One lock guards everything. Device work is done under it, except the background thread's, which
claims its slot first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.kv.address_space import Page
from penstock.kv.errors import (
    BatchError,
    BrokenCacheError,
    CacheFull,
    ContextError,
    NoSlot,
    SequenceError,
)
from penstock.kv.growth import Grower
from penstock.kv.layout import Layout
from penstock.kv.page_pool import PagePool
from penstock.kv.page_table import PageTable
from penstock.kv.slots import Sequence, Slot
from penstock.memory.arena import Arena

MAX_AHEAD = 64
"""Pages mapped ahead of one sequence, at most: beyond it a long prompt would hoard."""

Needs = list[tuple[Sequence, int]]
"""Sequences, each with the number of tokens it shall be able to hold."""


class SequenceTable:
    """Who holds which pages. The cache's methods are explained there."""

    def __init__(self, pool: PagePool, layout: Layout, slots: int) -> None:
        self.pool, self.layout = pool, layout
        self.table = PageTable(pool.space, layout, slots)
        self.lock = threading.Condition()
        self._turn = threading.RLock()  # taken before `lock`: callers come one after the other,
        # also while one of them waits for the background thread and has given `lock` up
        self._blank: Page | None = None
        self._scratch: list[Page] = []
        self._broken: BrokenCacheError | None = None
        self.mapped_inline = 0
        """Pages that had to be waited for."""
        self.grower = Grower(self.lock, self.table, pool, self._wants_more)

    # Coming and going

    def admit(self, prefix: tuple[Sequence, int] | None, expect: int) -> Sequence:
        with self.whole():
            shared: list[Page] = []
            if prefix is not None:
                donor, length = prefix
                row = self.slot_of(donor)
                if not 0 < length <= donor.length:
                    raise SequenceError(
                        f"a prefix of {length} tokens was asked of a sequence that has "
                        f"{donor.length}; share from 1 to that many"
                    )
                shared = row.pages[: self.layout.pages_for(length)]
            else:
                length = 0
            slot = best_fit(self, 0 if shared else self.layout.pages_for(expect))
            self.furnish(slot, shared)
            sequence = Sequence(length=length, prepared=length, _slot=slot)
            slot.sequence = sequence
            return sequence

    def finish(self, sequence: Sequence) -> None:
        with self.whole():
            if sequence._slot is not None:
                sequence._slot.sequence = None
            sequence._slot, sequence._saved, sequence._finished = None, None, True

    def advance(self, kept: Iterable[tuple[Sequence, int]]) -> None:
        with self.whole():
            kept = list(kept)
            for sequence, tokens in kept:
                self.slot_of(sequence)
                if not 0 <= tokens <= sequence.room:
                    raise SequenceError(
                        f"{tokens} tokens were kept of a sequence prepared for {sequence.room}; "
                        f"call prepare before the model runs"
                    )
            for sequence, tokens in kept:
                sequence.length += tokens
                sequence.prepared = sequence.length
                self.grower.wish(self.slot_of(sequence))

    def crop(self, sequence: Sequence, length: int) -> None:
        """Forget all but the first `length` tokens. Their pages are ahead of need then."""
        with self.whole():
            self.slot_of(sequence)
            if not 0 <= length <= sequence.length:
                raise SequenceError(
                    f"a sequence of {sequence.length} tokens cannot be cut to {length}"
                )
            sequence.length = sequence.prepared = length

    # Growing

    def prepare(self, new: Iterable[tuple[Sequence, int]]) -> None:
        with self.whole():
            self.grower.raise_failure()
            needs: Needs = []
            for sequence, tokens in new:
                self.slot_of(sequence)
                end = sequence.length + tokens
                if tokens < 0 or end > self.layout.max_context:
                    raise ContextError(
                        length=sequence.length, new=tokens, limit=self.layout.max_context
                    )
                needs.append((sequence, end))
            self.commit(needs)
            for sequence, end in needs:
                sequence.lookahead = end - sequence.length
                self.grower.wish(self.slot_of(sequence))

    def commit(self, needs: Needs) -> None:
        """Give each sequence pages of its own from its length to its need. All or nothing."""
        before = [(sequence, sequence.prepared) for sequence, _ in needs]
        self.grower.still(self.slot_of(sequence) for sequence, _ in needs)
        for sequence, end in needs:
            sequence.prepared = max(sequence.prepared, end)  # so that reclaiming spares its pages
        lengths = {s: len(self.slot_of(s).pages) for s, _ in needs}
        lacking = [need for need in needs if not self._has(*need)]  # few, when one token is asked
        try:
            missing = self._count_missing(lacking)
            if missing > self.pool.free:
                self.grower.still(self.table.slots)  # it may be mapping what is missing
                missing = self._count_missing(lacking)
            ensure_free(self, missing)
            new = sum(self._commit_one(sequence, end) for sequence, end in lacking)
        except BrokenCacheError:
            raise
        except BaseException:
            for sequence, prepared in before:
                sequence.prepared = prepared
                self.pool.give(self.table.truncate(self.slot_of(sequence), lengths[sequence]))
            raise
        self.mapped_inline += new

    def _has(self, sequence: Sequence, end: int) -> bool:
        """Whether it has pages up to there already, and shares none that it would write."""
        pages = self.slot_of(sequence).pages
        return self.layout.pages_for(end) <= len(pages) and all(
            self.pool.holders(pages[i]) == 1 for i in self._written(sequence, end)
        )

    def _commit_one(self, sequence: Sequence, end: int) -> int:
        """Returns how many pages were mapped behind the others."""
        slot = self.slot_of(sequence)
        for position in self._written(sequence, end):
            if self.pool.holders(slot.pages[position]) > 1:
                page = self.pool.take(1)
                try:
                    old = self.table.replace_by_copy(slot, position, page[0])
                except BaseException:
                    self.pool.give(page)
                    raise
                self.pool.give([old])
        pages = self.pool.take(max(0, self.layout.pages_for(end) - len(slot.pages)))
        try:
            self.table.append(slot, pages)
        except BaseException:
            self.pool.give(pages)
            raise
        return len(pages)

    def _written(self, sequence: Sequence, end: int) -> range:
        """The positions of pages it has that would be written."""
        if end <= sequence.length:
            return range(0)
        have = len(self.slot_of(sequence).pages)
        return range(
            self.layout.whole_pages(sequence.length), min(have, self.layout.pages_for(end))
        )

    def _count_missing(self, needs: Needs) -> int:
        """Pages to take: new ones, and one per write to a shared page, save by its last holder."""
        missing, writers = 0, Counter[Page]()
        for sequence, end in needs:
            pages = self.slot_of(sequence).pages
            missing += max(0, self.layout.pages_for(end) - len(pages))
            writers.update(pages[i] for i in self._written(sequence, end))
        return missing + sum(
            min(count, self.pool.holders(page) - 1) for page, count in writers.items()
        )

    # What is held without need

    def _wants_more(self, slot: Slot) -> bool:
        """Whether the thread should map another page: as many tokens ahead as were asked last."""
        sequence = slot.sequence
        if sequence is None or slot.growing:
            return False
        ahead = max(sequence.lookahead, self.layout.tokens_per_page)
        target = self.layout.pages_for(min(sequence.prepared + ahead, self.layout.max_context))
        most = self.layout.pages_for(sequence.prepared) + MAX_AHEAD
        return len(slot.pages) < min(target, most) and self.pool.free > 0

    def furnish(self, slot: Slot, shared: list[Page]) -> None:
        """Give a free slot a prefix, and behind it the pages it kept, zeroed."""
        self.grower.still([slot])
        own = [page for page in slot.pages if self.pool.holders(page) == 1]
        own = own[: self.layout.row_pages - len(shared)]
        pages = [*shared, *own]
        if pages != slot.pages:
            before = slot.pages
            self.pool.share(pages)
            self.table.rearrange({slot: pages})
            self.pool.give(before)
        self.table.zero(slot, len(shared), len(pages))

    # Ground rules

    @contextmanager
    def whole(self) -> Iterator[None]:
        """One operation at a time, on a cache that is whole."""
        with self._turn, self.lock:
            if self._broken is not None:
                raise self._broken
            try:
                yield
            except BrokenCacheError as broken:
                self._broken = broken
                raise

    def slot_of(self, sequence: Sequence) -> Slot:
        slot = sequence._slot
        if slot is None or slot.sequence is not sequence:
            state = "is finished" if sequence.finished else "is away; restore it first"
            raise SequenceError(f"this sequence of {sequence.length} tokens {state}")
        if self.table.slots[slot.index] is not slot:
            raise SequenceError("this sequence belongs to another cache")
        return slot

    @property
    def has_blank(self) -> bool:
        return self._blank is not None

    def blank(self) -> Page:
        """The one page that stands for padding. It is written once, with zeros. It is beside the
        budget: rows that are prepared can be shown, however full the pool is."""
        if self._blank is None:
            self._blank = self.pool.space.create()
            self.table.zero_page(self._blank)
        return self._blank

    def scratch(self) -> int:
        """Where padding rows write a token, counted from the first row's first. No sequence is
        there and nothing reads it. Beside the budget, as the blank page is."""
        with self.whole():
            if not self._scratch:
                pages: list[Page] = []
                try:
                    pages += (self.pool.space.create() for _ in range(self.layout.pages_for(1)))
                    self.table.show_scratch(pages)
                except BaseException:
                    for page in pages:
                        self.pool.space.destroy(page)
                    raise
                self._scratch = pages
            return len(self.table.slots) * self.layout.row_tokens

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """The background thread touches neither pages nor the device inside."""
        with self.whole():
            self.grower.still(self.table.slots)
            yield

    def resize(self, nbytes: int) -> None:
        with self.whole():
            excess = self.pool.used - nbytes // self.layout.page_nbytes
            if excess > 0:
                ensure_free(self, self.pool.free + excess)
            self.pool.resize(nbytes)

    def close(self) -> bool:
        """Give back every page and the range. False if pages were lost count of."""
        self.grower.close()
        with self._turn, self.lock:
            whole = self._broken is None
            for slot in self.table.slots:
                self.pool.give(self.table.truncate(slot, 0) if whole else self.table.abandon(slot))
            if self._scratch:
                self.table.hide_scratch(len(self._scratch))
            for page in [*self._scratch, *([] if self._blank is None else [self._blank])]:
                self.pool.space.destroy(page)
            self.table.close()
            self._broken = BrokenCacheError("the cache is closed; make a new one")
            return whole


# --------
# Sequences change rows by remapping, without a copy. Room: hold.


def line_up(keeper: SequenceTable, sequences: Listed[Sequence]) -> int:
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


def _exchange(keeper: SequenceTable, source: dict[Slot, Slot]) -> None:
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


def branch(keeper: SequenceTable, rows: list[Sequence], sources: list[int]) -> list[Sequence]:
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


def _live_pages(keeper: SequenceTable, sequence: Sequence) -> list[Page]:
    need = keeper.layout.pages_for(sequence.length)
    return keeper.slot_of(sequence).pages[:need]


def _with_own(keeper: SequenceTable, slot: Slot, pages: list[Page]) -> list[Page]:
    """A branch's pages, and behind them what the row had mapped ahead for itself."""
    ahead = [p for p in slot.pages[len(pages) :] if keeper.pool.holders(p) == 1 and p not in pages]
    return [*pages, *ahead]


def cover_gaps(keeper: SequenceTable, sequences: Listed[Sequence]) -> None:
    """Make every row readable as far as the longest will reach."""
    reach = keeper.layout.pages_for(max(sequence.prepared for sequence in sequences))
    slots = [keeper.slot_of(sequence) for sequence in sequences]
    if all(len(slot.pages) + slot.blanks >= reach for slot in slots):
        return
    blank = keeper.blank()
    keeper.grower.still(slots)
    for slot in slots:
        keeper.table.cover(slot, reach, blank)


# --------
# Pages that nobody needs go to those who do. Room: hold.
#
# Unmapping waits for the device, so it happens when pages are wanted and not when they are left.


def ensure_free(keeper: SequenceTable, wanted: int) -> None:
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


def _spare(keeper: SequenceTable) -> list[tuple[Slot, int]]:
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


def best_fit(keeper: SequenceTable, wanted: int) -> Slot:
    """The free slot whose kept pages fit best: the fewest that suffice, else the most."""
    slots = keeper.table.slots
    empty = [slot for slot in slots if slot.sequence is None]
    if not empty:
        raise NoSlot(slots=len(slots))
    enough = [slot for slot in empty if len(slot.pages) >= wanted]
    if enough:
        return min(enough, key=lambda slot: len(slot.pages))
    return max(empty, key=lambda slot: len(slot.pages))


# --------
# A sequence's tokens go to host memory and come back. Room: hold.


def preempt(keeper: SequenceTable, sequence: Sequence) -> int:
    """Copy a sequence out and free its slot; returns the bytes copied.

    Its pages stay with the slot until someone needs them. What it shared is copied like the rest,
    and is its own when it comes back.
    """
    with keeper.whole():
        slot = keeper.slot_of(sequence)
        nbytes = sequence.length * keeper.layout.token_nbytes
        if nbytes:
            pinned = keeper.pool.space.device.type == "cuda"
            sequence._saved = Arena(nbytes, pinned=pinned).tensor(nbytes, torch.uint8)
            sequence._saved.copy_(keeper.table.part(slot, nbytes))
        slot.sequence = sequence._slot = None
        sequence.prepared = sequence.length
        return nbytes


def restore(keeper: SequenceTable, sequence: Sequence) -> None:
    """Bring a sequence back into a slot. CacheFull or NoSlot leave it where it is."""
    with keeper.whole():
        if sequence.finished or sequence.resident:
            state = "is finished" if sequence.finished else "is in its slot already"
            raise SequenceError(f"a sequence that {state} cannot be restored")
        length = sequence.length
        slot = best_fit(keeper, keeper.layout.pages_for(length))
        keeper.furnish(slot, [])
        slot.sequence, sequence._slot = sequence, slot
        sequence.length = sequence.prepared = 0
        try:
            keeper.commit([(sequence, length)])
        except BaseException:
            slot.sequence = sequence._slot = None
            raise
        finally:
            sequence.length = sequence.prepared = length
        if sequence._saved is not None:
            keeper.table.part(slot, sequence._saved.numel()).copy_(sequence._saved)
        sequence._saved = None


# --------
# What a cache holds, counted. Room: hold.


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


def count(keeper: SequenceTable) -> Stats:
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
