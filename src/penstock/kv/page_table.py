"""Which page shows in which row. Room: hold.

It maps and unmaps, and knows nothing of sequences or budgets: the keeper says what is to be where,
and holds the pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from penstock.kv.address_space import Page, Space
from penstock.kv.errors import BrokenCacheError, SpaceError
from penstock.kv.layout import Layout
from penstock.kv.slots import Slot


class PageTable:
    """One reserved range of `count` rows, one row more of which only the first token ever has
    memory, and one page beside them to copy through."""

    def __init__(self, space: Space, layout: Layout, count: int) -> None:
        self._space, self._row_pages, self._rows = space, layout.row_pages, count
        self._unit = space.page_nbytes
        self._num_pages = (count + 1) * layout.row_pages + 1
        self._address = space.reserve(self._num_pages)
        self._bytes = space.bytes_at(self._address, self._num_pages * self._unit)
        self.slots = [Slot(i) for i in range(count)]

    def rows(self) -> torch.Tensor:
        """The bytes of all rows, one behind the other, the one for padding last. Mapped where pages
        are, and only there."""
        return self._bytes[: (self._num_pages - 1) * self._unit]

    def append(self, slot: Slot, pages: Sequence[Page]) -> None:
        """More pages behind a row's own, zeroed: see the note on zeros in `keeper`."""
        if not pages:
            return
        self._uncover(slot)
        first = len(slot.pages)
        self._space.map(self._at(slot, first), pages)
        slot.pages.extend(pages)
        self.zero(slot, first, len(slot.pages))

    def map_ahead(self, slot: Slot, page: Page) -> None:
        """The background thread's half of `append`: maps and zeroes, and leaves `slot` alone."""
        first = len(slot.pages)
        self._space.map(self._at(slot, first), [page])
        try:
            self._space.clear(self._part(slot, first, first + 1))
        except BaseException:
            self._space.unmap(self._at(slot, first), 1)
            raise

    def truncate(self, slot: Slot, count: int) -> list[Page]:
        """Unmap a row's pages from number `count` on, and return them."""
        self._uncover(slot)
        gone = slot.pages[count:]
        if gone:
            self._space.settle()
            self._space.unmap(self._at(slot, count), len(gone))
            del slot.pages[count:]
        return gone

    def rearrange(self, contents: Mapping[Slot, Sequence[Page]]) -> None:
        """Give rows new pages, in one go. Pages that stay where they are cost nothing."""
        self._space.settle()
        with _no_way_back():
            for slot, pages in contents.items():
                self._uncover(slot)
                for start, end in _differing(slot.pages, pages):
                    self._space.unmap(self._at(slot, start), end - start)
            for slot, pages in contents.items():
                for start, end in _differing(pages, slot.pages):
                    self._space.map(self._at(slot, start), pages[start:end])
                slot.pages = list(pages)

    def replace_by_copy(self, slot: Slot, position: int, page: Page) -> Page:
        """Copy a row's page into `page` and show that instead; returns the one that was there."""
        bench = self._address + (self._num_pages - 1) * self._unit
        self._space.map(bench, [page])
        try:
            self._bytes[-self._unit :].copy_(self._part(slot, position, position + 1))
            self._space.settle()
        finally:
            self._space.unmap(bench, 1)
        old = slot.pages[position]
        with _no_way_back():
            self._space.unmap(self._at(slot, position), 1)
            self._space.map(self._at(slot, position), [page])
        slot.pages[position] = page
        return old

    def zero_page(self, page: Page) -> None:
        """Zero a page that is in no row."""
        bench = self._address + (self._num_pages - 1) * self._unit
        self._space.map(bench, [page])
        try:
            self._bytes[-self._unit :].zero_()
            self._space.settle()
        finally:
            self._space.unmap(bench, 1)

    def show_scratch(self, pages: Sequence[Page]) -> None:
        """Memory for the first token of the row behind all others, to be written and never read."""
        self._space.map(self._scratch, pages)

    def hide_scratch(self, count: int) -> None:
        self._space.settle()
        self._space.unmap(self._scratch, count)

    @property
    def _scratch(self) -> int:
        return self._address + self._rows * self._row_pages * self._unit

    def cover(self, slot: Slot, count: int, blank: Page) -> None:
        """Make the first `count` pages of a row readable, the blank page standing for the rest."""
        missing = count - len(slot.pages) - slot.blanks
        if missing > 0:
            at = self._at(slot, len(slot.pages) + slot.blanks)
            self._space.map(at, [blank] * missing, writable=False)
            slot.blanks += missing

    def zero(self, slot: Slot, start: int, end: int) -> None:
        if end > start:
            self._part(slot, start, end).zero_()

    def part(self, slot: Slot, nbytes: int) -> torch.Tensor:
        """The first bytes of a row."""
        start = slot.index * self._row_pages * self._unit
        return self._bytes[start : start + nbytes]

    def abandon(self, slot: Slot) -> list[Page]:
        """`truncate` to nothing, of a row that may have lost some of its pages."""
        self._space.settle()
        for position in range(len(slot.pages) + slot.blanks):
            with contextlib.suppress(SpaceError):
                self._space.unmap(self._at(slot, position), 1)
        gone, slot.pages, slot.blanks = slot.pages, [], 0
        return gone

    def close(self) -> None:
        """Give the range back. Every row is empty already; tensors over it must not be used."""
        self._space.release(self._address, self._num_pages)

    def _uncover(self, slot: Slot) -> None:
        if slot.blanks:
            self._space.settle()
            self._space.unmap(self._at(slot, len(slot.pages)), slot.blanks)
            slot.blanks = 0

    def _at(self, slot: Slot, page: int) -> int:
        return self._address + (slot.index * self._row_pages + page) * self._unit

    def _part(self, slot: Slot, start: int, end: int) -> torch.Tensor:
        first = slot.index * self._row_pages
        return self._bytes[(first + start) * self._unit : (first + end) * self._unit]


@contextlib.contextmanager
def _no_way_back() -> Iterator[None]:
    """Between taking pages away and showing others a row is neither old nor new."""
    try:
        yield
    except Exception as failed:
        raise BrokenCacheError(
            f"a row was left without its pages ({failed}); close the cache and make a new one"
        ) from failed


def _differing(old: Sequence[Page], new: Sequence[Page]) -> Iterator[tuple[int, int]]:
    """Runs of positions where `old` has a page that `new` has not there."""
    start = None
    for i, page in enumerate(old):
        same = i < len(new) and new[i] == page
        if not same and start is None:
            start = i
        elif same and start is not None:
            yield start, i
            start = None
    if start is not None:
        yield start, len(old)
