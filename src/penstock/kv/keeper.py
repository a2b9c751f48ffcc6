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
from contextlib import contextmanager

from penstock.kv import reclaiming
from penstock.kv.errors import (
    BrokenCacheError,
    ContextError,
    SequenceError,
)
from penstock.kv.growth import Grower
from penstock.kv.layout import Layout
from penstock.kv.pool import PagePool
from penstock.kv.slots import Sequence, Slot
from penstock.kv.space import Page
from penstock.kv.table import PageTable

MAX_AHEAD = 64
"""Pages mapped ahead of one sequence, at most: beyond it a long prompt would hoard."""

Needs = list[tuple[Sequence, int]]
"""Sequences, each with the number of tokens it shall be able to hold."""


class Keeper:
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
            slot = reclaiming.best_fit(self, 0 if shared else self.layout.pages_for(expect))
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
            reclaiming.ensure_free(self, missing)
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
                reclaiming.ensure_free(self, self.pool.free + excess)
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
