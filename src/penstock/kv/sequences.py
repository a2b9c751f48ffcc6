"""The sequences of a cache: how they are admitted, grow, share pages, move and leave.

`SequenceTable` decides which slot holds which pages. The functions below it move sequences between
rows, reclaim unneeded pages, move sequences to host memory, and count pages.

Why pages are zeroed: a kernel over padded rows multiplies what comes after a short row by zero, and
zero times a stray NaN is NaN. So a page is zeroed whenever it is given to another sequence. After a
row's end there is nothing but zeros and what that sequence itself once wrote.

Locks: one lock guards everything. Device work is done under it, except that of the background
thread (`penstock.kv.growth`), which claims its slot first.
"""

from __future__ import annotations

import threading
from collections import Counter, abc
from collections.abc import Iterable, Iterator
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

MAX_PAGES_AHEAD = 64
"""Maximum number of pages mapped ahead of one sequence: without it a long prompt would hoard."""

Needs = list[tuple[Sequence, int]]
"""Sequences, each with the number of tokens that it must be able to hold."""


class SequenceTable:
    """The sequences of one cache, and the pages that each of them holds.

    Most methods implement those of the same name in `VirtualCache`, where they are explained.
    """

    def __init__(self, pool: PagePool, layout: Layout, slots: int) -> None:
        self.pool, self.layout = pool, layout
        self.page_table = PageTable(pool.space, layout, slots)
        self.lock = threading.Condition()
        # Acquired before `lock`. Operations exclude each other even while one of them waits for the
        # background thread, for which it releases `lock`.
        self._operation = threading.RLock()
        self._blank: Page | None = None
        self._scratch: list[Page] = []
        self._broken: BrokenCacheError | None = None
        self.mapped_inline = 0
        """Number of pages that a caller had to wait for."""
        self.grower = Grower(self.lock, self.page_table, pool, self._wants_more)

    # Admitting and finishing

    def admit(self, prefix: tuple[Sequence, int] | None, expect: int) -> Sequence:
        with self.exclusive():
            shared: list[Page] = []
            if prefix is not None:
                donor, length = prefix
                row = self.slot_of(donor)
                if not 0 < length <= donor.length:
                    raise SequenceError(
                        f"cannot share a prefix of {length} tokens with a sequence of "
                        f"{donor.length}; share 1 to {donor.length} tokens"
                    )
                shared = row.pages[: self.layout.pages_for(length)]
            else:
                length = 0
            slot = find_slot(self, 0 if shared else self.layout.pages_for(expect))
            self.reset_slot(slot, shared)
            sequence = Sequence(length=length, prepared=length, _slot=slot)
            slot.sequence = sequence
            return sequence

    def finish(self, sequence: Sequence) -> None:
        with self.exclusive():
            if sequence._slot is not None:
                sequence._slot.sequence = None
            sequence._slot, sequence._saved, sequence._finished = None, None, True

    def advance(self, kept: Iterable[tuple[Sequence, int]]) -> None:
        with self.exclusive():
            kept = list(kept)
            for sequence, tokens in kept:
                self.slot_of(sequence)
                if not 0 <= tokens <= sequence.room:
                    raise SequenceError(
                        f"cannot keep {tokens} new tokens of a sequence that is prepared for "
                        f"{sequence.room}; call prepare before the model runs"
                    )
            for sequence, tokens in kept:
                sequence.length += tokens
                sequence.prepared = sequence.length
                self.grower.request(self.slot_of(sequence))

    def crop(self, sequence: Sequence, length: int) -> None:
        """Drop all but the first `length` tokens. The pages of the others are ahead of need."""
        with self.exclusive():
            self.slot_of(sequence)
            if not 0 <= length <= sequence.length:
                raise SequenceError(
                    f"a sequence of {sequence.length} tokens cannot be cropped to {length}"
                )
            sequence.length = sequence.prepared = length

    # Growing

    def prepare(self, new: Iterable[tuple[Sequence, int]]) -> None:
        with self.exclusive():
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
            self.map_needed(needs)
            for sequence, end in needs:
                sequence.lookahead = end - sequence.length
                self.grower.request(self.slot_of(sequence))

    def map_needed(self, needs: Needs) -> None:
        """Give each sequence pages of its own from its length to its need: to all or to none."""
        before = [(sequence, sequence.prepared) for sequence, _ in needs]
        self.grower.wait_for(self.slot_of(sequence) for sequence, _ in needs)
        for sequence, end in needs:
            # Set before reclaiming, so that reclaiming spares the pages of these sequences.
            sequence.prepared = max(sequence.prepared, end)
        page_counts = {s: len(self.slot_of(s).pages) for s, _ in needs}
        lacking = [need for need in needs if not self._has_pages(*need)]  # few, for one token each
        try:
            missing = self._count_missing(lacking)
            if missing > self.pool.free:
                # The background thread may be mapping the pages that seem to be missing.
                self.grower.wait_for(self.page_table.slots)
                missing = self._count_missing(lacking)
            ensure_free(self, missing)
            new = sum(self._map_for(sequence, end) for sequence, end in lacking)
        except BrokenCacheError:
            raise
        except BaseException:
            for sequence, prepared in before:
                sequence.prepared = prepared
                slot = self.slot_of(sequence)
                self.pool.release(self.page_table.truncate(slot, page_counts[sequence]))
            raise
        self.mapped_inline += new

    def _has_pages(self, sequence: Sequence, end: int) -> bool:
        """Return whether it has pages up to `end`, and shares none of those it would write."""
        pages = self.slot_of(sequence).pages
        return self.layout.pages_for(end) <= len(pages) and all(
            self.pool.holders(pages[i]) == 1 for i in self._written_pages(sequence, end)
        )

    def _map_for(self, sequence: Sequence, end: int) -> int:
        """Copy shared pages that would be written, and append pages; return how many."""
        slot = self.slot_of(sequence)
        for position in self._written_pages(sequence, end):
            if self.pool.holders(slot.pages[position]) > 1:
                page = self.pool.allocate(1)
                try:
                    old = self.page_table.replace_by_copy(slot, position, page[0])
                except BaseException:
                    self.pool.release(page)
                    raise
                self.pool.release([old])
        pages = self.pool.allocate(max(0, self.layout.pages_for(end) - len(slot.pages)))
        try:
            self.page_table.append(slot, pages)
        except BaseException:
            self.pool.release(pages)
            raise
        return len(pages)

    def _written_pages(self, sequence: Sequence, end: int) -> range:
        """Return the positions of existing pages that writing up to `end` would change."""
        if end <= sequence.length:
            return range(0)
        have = len(self.slot_of(sequence).pages)
        return range(
            self.layout.whole_pages(sequence.length), min(have, self.layout.pages_for(end))
        )

    def _count_missing(self, needs: Needs) -> int:
        """Count the pages to allocate: new ones, and copies of shared pages that are written.

        The last holder of a shared page that is written keeps the original.
        """
        missing, writers = 0, Counter[Page]()
        for sequence, end in needs:
            pages = self.slot_of(sequence).pages
            missing += max(0, self.layout.pages_for(end) - len(pages))
            writers.update(pages[i] for i in self._written_pages(sequence, end))
        return missing + sum(
            min(count, self.pool.holders(page) - 1) for page, count in writers.items()
        )

    def _wants_more(self, slot: Slot) -> bool:
        """Return whether the background thread should map another page for a slot.

        It maps as many tokens ahead as the last `prepare` asked for, and at least one page.
        """
        sequence = slot.sequence
        if sequence is None or slot.growing:
            return False
        ahead = max(sequence.lookahead, self.layout.tokens_per_page)
        target = self.layout.pages_for(min(sequence.prepared + ahead, self.layout.max_context))
        most = self.layout.pages_for(sequence.prepared) + MAX_PAGES_AHEAD
        return len(slot.pages) < min(target, most) and self.pool.free > 0

    # Pages of a slot

    def reset_slot(self, slot: Slot, shared: list[Page]) -> None:
        """Give a free slot the pages of a prefix, and after them the pages it kept, zeroed."""
        self.grower.wait_for([slot])
        own = [page for page in slot.pages if self.pool.holders(page) == 1]
        own = own[: self.layout.row_pages - len(shared)]
        pages = [*shared, *own]
        if pages != slot.pages:
            before = slot.pages
            self.pool.share(pages)
            self.page_table.rearrange({slot: pages})
            self.pool.release(before)
        self.page_table.zero(slot, len(shared), len(pages))

    @property
    def has_blank(self) -> bool:
        """Whether the blank page exists."""
        return self._blank is not None

    def blank(self) -> Page:
        """Return the blank page, which stands for padding in all rows. It is zeroed once.

        It is not part of the budget: rows that are prepared can be read, however full the pool is.
        """
        if self._blank is None:
            self._blank = self.pool.space.create()
            self.page_table.zero_page(self._blank)
        return self._blank

    def scratch(self) -> int:
        """Return the position that padding rows write to, in tokens from the first row's start.

        No sequence is there and nothing reads it. Like the blank page, it is not part of the
        budget.
        """
        with self.exclusive():
            if not self._scratch:
                pages: list[Page] = []
                try:
                    pages += (self.pool.space.create() for _ in range(self.layout.pages_for(1)))
                    self.page_table.map_scratch(pages)
                except BaseException:
                    for page in pages:
                        self.pool.space.destroy(page)
                    raise
                self._scratch = pages
            return len(self.page_table.slots) * self.layout.row_tokens

    # All of it

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run one operation at a time, and none on a cache that is broken or closed."""
        with self._operation, self.lock:
            if self._broken is not None:
                raise self._broken
            try:
                yield
            except BrokenCacheError as broken:
                self._broken = broken
                raise

    @contextmanager
    def growth_paused(self) -> Iterator[None]:
        """Keep the background thread from touching pages or the device inside the block."""
        with self.exclusive():
            self.grower.wait_for(self.page_table.slots)
            yield

    def slot_of(self, sequence: Sequence) -> Slot:
        """Return a sequence's slot, or raise SequenceError if it has none in this cache."""
        slot = sequence._slot
        if slot is None or slot.sequence is not sequence:
            state = "is finished" if sequence.finished else "is in host memory; restore it first"
            raise SequenceError(f"this sequence of {sequence.length} tokens {state}")
        if self.page_table.slots[slot.index] is not slot:
            raise SequenceError("this sequence belongs to another cache")
        return slot

    def resize(self, nbytes: int) -> None:
        with self.exclusive():
            excess = self.pool.used - nbytes // self.layout.page_nbytes
            if excess > 0:
                ensure_free(self, self.pool.free + excess)
            self.pool.resize(nbytes)

    def close(self) -> bool:
        """Release every page and the address range. Return False if some pages were lost."""
        self.grower.close()
        with self._operation, self.lock:
            intact = self._broken is None
            remove = self._truncate_to_nothing if intact else self.page_table.abandon
            for slot in self.page_table.slots:
                self.pool.release(remove(slot))
            if self._scratch:
                self.page_table.unmap_scratch(len(self._scratch))
            for page in [*self._scratch, *([] if self._blank is None else [self._blank])]:
                self.pool.space.destroy(page)
            self.page_table.close()
            self._broken = BrokenCacheError("the cache is closed; create a new one")
            return intact

    def _truncate_to_nothing(self, slot: Slot) -> list[Page]:
        return self.page_table.truncate(slot, 0)


# Moving sequences between rows: by remapping, without a copy.


def make_adjacent(table: SequenceTable, sequences: abc.Sequence[Sequence]) -> int:
    """Move sequences into adjacent rows, in their order, and return the first row.

    Sequences that are adjacent already cost nothing. Otherwise they move to the run of rows for
    which the fewest pages have to be mapped again. The contents of those rows move to where the
    sequences were.
    """
    slots = [table.slot_of(sequence) for sequence in sequences]
    if len(set(slots)) < len(slots):
        raise BatchError("a sequence is in the batch twice; each row needs a sequence of its own")
    first = slots[0].index
    if all(slot.index == first + i for i, slot in enumerate(slots)):
        return first
    rows = table.page_table.slots
    table.grower.wait_for(rows)
    starts = range(len(rows) - len(slots) + 1)
    first = min(starts, key=lambda start: _moving_cost(slots, rows[start : start + len(slots)]))
    _exchange(table, dict(zip(rows[first : first + len(slots)], slots, strict=True)))
    return first


def _moving_cost(slots: list[Slot], targets: list[Slot]) -> int:
    """Count the pages to map again if the contents of `slots` moved to `targets`."""
    moved = sum(len(s.pages) for s, t in zip(slots, targets, strict=True) if s is not t)
    return moved + sum(len(t.pages) for t in targets if t not in slots)


def _exchange(table: SequenceTable, source: dict[Slot, Slot]) -> None:
    """Give each key the contents of its value; move displaced contents to rows left empty."""
    displaced = [target for target in source if target not in source.values()]
    emptied = [slot for slot in source.values() if slot not in source]
    source = source | dict(zip(emptied, displaced, strict=True))
    source = {target: slot for target, slot in source.items() if target is not slot}
    sequences = {target: slot.sequence for target, slot in source.items()}
    table.page_table.rearrange({target: slot.pages for target, slot in source.items()})
    for target, sequence in sequences.items():
        target.sequence = sequence
        if sequence is not None:
            sequence._slot = target


def branch(table: SequenceTable, rows: list[Sequence], sources: list[int]) -> list[Sequence]:
    """Make new rows: row i continues old row `sources[i]`, as in beam search.

    Pages are shared, and copied only when one of the holders writes.
    """
    with table.exclusive():
        contents = [_live_pages(table, rows[source]) for source in sources]
        lengths = [rows[source].length for source in sources]
        added = [table.admit(None, 0) for _ in sources[len(rows) :]]
        for extra in rows[len(sources) :]:
            table.finish(extra)
        new = [*rows[: len(sources)], *added]
        slots = [table.slot_of(sequence) for sequence in new]
        table.grower.wait_for(slots)
        wanted = {
            slot: _with_pages_ahead(table, slot, pages)
            for slot, pages in zip(slots, contents, strict=True)
        }
        before = [page for slot in slots for page in slot.pages]
        # Share before releasing, so that no page becomes free in between.
        for pages in wanted.values():
            table.pool.share(pages)
        table.page_table.rearrange(wanted)
        table.pool.release(before)
        for sequence, length in zip(new, lengths, strict=True):
            sequence.length = sequence.prepared = length
        return new


def _live_pages(table: SequenceTable, sequence: Sequence) -> list[Page]:
    need = table.layout.pages_for(sequence.length)
    return table.slot_of(sequence).pages[:need]


def _with_pages_ahead(table: SequenceTable, slot: Slot, pages: list[Page]) -> list[Page]:
    """Return a branch's pages, followed by the pages that the row had mapped ahead of need."""
    ahead = [p for p in slot.pages[len(pages) :] if table.pool.holders(p) == 1 and p not in pages]
    return [*pages, *ahead]


def cover_padding(table: SequenceTable, sequences: abc.Sequence[Sequence]) -> None:
    """Make every row readable as far as the longest of them will reach."""
    reach = table.layout.pages_for(max(sequence.prepared for sequence in sequences))
    slots = [table.slot_of(sequence) for sequence in sequences]
    if all(len(slot.pages) + slot.blanks >= reach for slot in slots):
        return
    blank = table.blank()
    table.grower.wait_for(slots)
    for slot in slots:
        table.page_table.cover(slot, reach, blank)


# Reclaiming unneeded pages.
#
# Unmapping waits for the device, so it happens when pages are needed, not when they are left.


def ensure_free(table: SequenceTable, wanted: int) -> None:
    """Reclaim pages until `wanted` are free, or raise CacheFull without changing anything."""
    pool = table.pool
    missing = wanted - pool.free
    if missing <= 0:
        return
    spare = _spare_pages(table)
    left = Counter(page for slot, need in spare for page in slot.pages[need:])
    # A page that several slots share becomes free only if none of its holders needs it.
    reclaimable = sum(pool.holders(page) == slots for page, slots in left.items())
    if reclaimable < missing:
        raise CacheFull(
            what="growing",
            wanted=wanted,
            free=pool.free + reclaimable,
            budget=pool.total,
            page=table.layout.page_nbytes,
        )
    for slot, need in spare:
        while wanted > pool.free and len(slot.pages) > need:
            least = max(need, len(slot.pages) - (wanted - pool.free))
            pool.release(table.page_table.truncate(slot, least))


def _spare_pages(table: SequenceTable) -> list[tuple[Slot, int]]:
    """Return slots that hold more pages than they need, each with the number it needs.

    Pages kept in empty slots come first, then those mapped ahead of need.
    """
    kept, ahead = [], []
    table.grower.wait_for(table.page_table.slots)
    for slot in table.page_table.slots:
        if slot.sequence is None:
            kept.append((slot, 0))
        else:
            ahead.append((slot, table.layout.pages_for(slot.sequence.prepared)))
    spare = [*reversed(kept), *reversed(ahead)]
    return [(slot, need) for slot, need in spare if len(slot.pages) > need]


def find_slot(table: SequenceTable, wanted: int) -> Slot:
    """Find the free slot with the fewest kept pages that suffice, or else with the most."""
    slots = table.page_table.slots
    empty = [slot for slot in slots if slot.sequence is None]
    if not empty:
        raise NoSlot(slots=len(slots))
    enough = [slot for slot in empty if len(slot.pages) >= wanted]
    if enough:
        return min(enough, key=lambda slot: len(slot.pages))
    return max(empty, key=lambda slot: len(slot.pages))


# Moving sequences to host memory and back.


def preempt(table: SequenceTable, sequence: Sequence) -> int:
    """Copy a sequence to host memory and free its slot; return the number of bytes copied.

    Its pages stay with the slot until they are needed elsewhere. Shared pages are copied like the
    others, and are no longer shared when the sequence is restored.
    """
    with table.exclusive():
        slot = table.slot_of(sequence)
        nbytes = sequence.length * table.layout.token_nbytes
        if nbytes:
            pinned = table.pool.space.device.type == "cuda"
            sequence._saved = Arena(nbytes, pinned=pinned).tensor(nbytes, torch.uint8)
            sequence._saved.copy_(table.page_table.part(slot, nbytes))
        slot.sequence = sequence._slot = None
        sequence.prepared = sequence.length
        return nbytes


def restore(table: SequenceTable, sequence: Sequence) -> None:
    """Copy a sequence back into a slot. CacheFull or NoSlot leave it in host memory."""
    with table.exclusive():
        if sequence.finished or sequence.resident:
            state = "is finished" if sequence.finished else "is in a slot already"
            raise SequenceError(f"a sequence that {state} cannot be restored")
        length = sequence.length
        slot = find_slot(table, table.layout.pages_for(length))
        table.reset_slot(slot, [])
        slot.sequence, sequence._slot = sequence, slot
        sequence.length = sequence.prepared = 0
        try:
            table.map_needed([(sequence, length)])
        except BaseException:
            slot.sequence = sequence._slot = None
            raise
        finally:
            sequence.length = sequence.prepared = length
        if sequence._saved is not None:
            table.page_table.part(slot, sequence._saved.numel()).copy_(sequence._saved)
        sequence._saved = None


# Counting.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The pages of a cache at one moment: `free + live + ahead + kept + others == pages_total`.

    A page that several sequences share counts once.
    """

    pages_total: int
    """Number of pages that the budget allows."""
    free: int
    """Pages without a holder."""
    live: int
    """Pages that hold tokens of a sequence."""
    ahead: int
    """Pages mapped after a live sequence, before it needs them."""
    kept: int
    """Pages of finished sequences, kept for the next sequence or until needed elsewhere."""
    blank: int
    """1 if the blank page exists, which stands for padding and is not part of the budget."""
    others: int
    """Pages held by other users of the pool."""
    shared: int
    """How many of the live pages hold tokens of more than one sequence."""
    page_nbytes: int
    needed_bytes: int
    """Bytes that the tokens need."""
    grown_ahead: int
    """Number of pages mapped in the background so far."""
    grown_inline: int
    """Number of pages that a `prepare` had to wait for so far."""

    @property
    def mapped_bytes(self) -> int:
        return (self.live + self.ahead + self.kept) * self.page_nbytes

    @property
    def waste(self) -> int:
        """Bytes of live pages that hold no token: less than a page per sequence."""
        return self.live * self.page_nbytes - self.needed_bytes


def count_pages(table: SequenceTable) -> Stats:
    """Count the pages of a cache by what they are used for."""
    with table.lock:
        layout, pool = table.layout, table.pool
        filled: dict[Page, int] = {}
        sharers: dict[Page, int] = {}
        mapped: set[Page] = set()
        behind: set[Page] = set()
        growing = 0
        for slot in table.page_table.slots:
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
            blank=int(table.has_blank),
            others=pool.used - len(live) - ahead - kept,
            shared=sum(n > 1 for n in sharers.values()),
            page_nbytes=layout.page_nbytes,
            needed_bytes=sum(filled.values()),
            grown_ahead=table.grower.mapped,
            grown_inline=table.mapped_inline,
        )
