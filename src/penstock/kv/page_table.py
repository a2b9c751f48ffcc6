"""The mapping of pages to rows.

The page table maps and unmaps pages. It knows nothing about sequences or budgets: the
`SequenceTable` decides which pages a row gets, and holds them in the pool.
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
    """A reserved range of `count` rows, followed by two places of its own.

    The first is the scratch row, to which padding rows of a decode batch write; only its first
    token ever has memory. The second is the workbench: one page through which pages are copied.
    """

    def __init__(self, space: Space, layout: Layout, count: int) -> None:
        self._space, self._row_pages, self._rows = space, layout.row_pages, count
        self._unit = space.page_nbytes
        self._num_pages = (count + 1) * layout.row_pages + 1
        self._address = space.reserve(self._num_pages)
        self._bytes = space.bytes_at(self._address, self._num_pages * self._unit)
        self.slots = [Slot(i) for i in range(count)]

    def rows(self) -> torch.Tensor:
        """Return the bytes of all rows, the scratch row last. Only mapped pages may be touched."""
        return self._bytes[: (self._num_pages - 1) * self._unit]

    def part(self, slot: Slot, nbytes: int) -> torch.Tensor:
        """Return the first bytes of a row."""
        start = slot.index * self._row_pages * self._unit
        return self._bytes[start : start + nbytes]

    # Growing and shrinking a row

    def append(self, slot: Slot, pages: Sequence[Page]) -> None:
        """Map more pages after a row's own, and zero them: see `penstock.kv.sequences`."""
        if not pages:
            return
        self._uncover(slot)
        first = len(slot.pages)
        self._space.map(self._address_of(slot, first), pages)
        slot.pages.extend(pages)
        self.zero(slot, first, len(slot.pages))

    def map_ahead(self, slot: Slot, page: Page) -> None:
        """Map and zero a page after a row's own, without changing `slot`.

        The background thread calls this without the lock; it updates the slot under the lock
        afterwards.
        """
        first = len(slot.pages)
        self._space.map(self._address_of(slot, first), [page])
        try:
            self._space.zero(self._bytes_of(slot, first, first + 1))
        except BaseException:
            self._space.unmap(self._address_of(slot, first), 1)
            raise

    def truncate(self, slot: Slot, count: int) -> list[Page]:
        """Unmap all but the first `count` pages of a row, and return them."""
        self._uncover(slot)
        removed = slot.pages[count:]
        if removed:
            self._space.synchronize()  # kernels in flight may still read the pages
            self._space.unmap(self._address_of(slot, count), len(removed))
            del slot.pages[count:]
        return removed

    def abandon(self, slot: Slot) -> list[Page]:
        """Unmap all pages of a row that may have lost some of them, and return them."""
        self._space.synchronize()
        for position in range(len(slot.pages) + slot.blanks):
            with contextlib.suppress(SpaceError):
                self._space.unmap(self._address_of(slot, position), 1)
        removed, slot.pages, slot.blanks = slot.pages, [], 0
        return removed

    def cover(self, slot: Slot, count: int, blank: Page) -> None:
        """Make the first `count` pages of a row readable: map the blank page where it has none."""
        missing = count - len(slot.pages) - slot.blanks
        if missing > 0:
            address = self._address_of(slot, len(slot.pages) + slot.blanks)
            self._space.map(address, [blank] * missing, writable=False)
            slot.blanks += missing

    def _uncover(self, slot: Slot) -> None:
        if slot.blanks:
            self._space.synchronize()
            self._space.unmap(self._address_of(slot, len(slot.pages)), slot.blanks)
            slot.blanks = 0

    # Moving pages

    def rearrange(self, contents: Mapping[Slot, Sequence[Page]]) -> None:
        """Give rows new pages, all rows in one step. Pages that stay in place cost nothing."""
        self._space.synchronize()
        with _irreversible():
            for slot, pages in contents.items():
                self._uncover(slot)
                for start, end in _differing_runs(slot.pages, pages):
                    self._space.unmap(self._address_of(slot, start), end - start)
            for slot, pages in contents.items():
                for start, end in _differing_runs(pages, slot.pages):
                    self._space.map(self._address_of(slot, start), pages[start:end])
                slot.pages = list(pages)

    def replace_by_copy(self, slot: Slot, position: int, page: Page) -> Page:
        """Copy a row's page into `page`, map that instead, and return the page that was there."""
        with self._on_workbench(page) as workbench:
            workbench.copy_(self._bytes_of(slot, position, position + 1))
        old = slot.pages[position]
        with _irreversible():
            self._space.unmap(self._address_of(slot, position), 1)
            self._space.map(self._address_of(slot, position), [page])
        slot.pages[position] = page
        return old

    def zero_page(self, page: Page) -> None:
        """Zero a page that is in no row."""
        with self._on_workbench(page) as workbench:
            workbench.zero_()

    def zero(self, slot: Slot, start: int, end: int) -> None:
        """Zero pages `start` to `end` of a row."""
        if end > start:
            self._bytes_of(slot, start, end).zero_()

    @contextlib.contextmanager
    def _on_workbench(self, page: Page) -> Iterator[torch.Tensor]:
        """Map a page at the workbench inside the block, and wait for work on it at the end."""
        address = self._address + (self._num_pages - 1) * self._unit
        self._space.map(address, [page])
        try:
            yield self._bytes[-self._unit :]
            self._space.synchronize()
        finally:
            self._space.unmap(address, 1)

    # The scratch row

    def map_scratch(self, pages: Sequence[Page]) -> None:
        """Map memory for the first token of the scratch row, which is written and never read."""
        self._space.map(self._scratch, pages)

    def unmap_scratch(self, count: int) -> None:
        """Unmap the pages of the scratch row."""
        self._space.synchronize()
        self._space.unmap(self._scratch, count)

    @property
    def _scratch(self) -> int:
        return self._address + self._rows * self._row_pages * self._unit

    def close(self) -> None:
        """Release the range. Every row must be empty; tensors over it must not be used again."""
        self._space.release(self._address, self._num_pages)

    def _address_of(self, slot: Slot, page: int) -> int:
        return self._address + (slot.index * self._row_pages + page) * self._unit

    def _bytes_of(self, slot: Slot, start: int, end: int) -> torch.Tensor:
        first = slot.index * self._row_pages
        return self._bytes[(first + start) * self._unit : (first + end) * self._unit]


@contextlib.contextmanager
def _irreversible() -> Iterator[None]:
    """Turn any error inside the block into BrokenCacheError.

    Between unmapping pages and mapping others, a row has neither its old nor its new contents, and
    the unmapping cannot be undone.
    """
    try:
        yield
    except Exception as error:
        raise BrokenCacheError(
            f"a row was left without its pages ({error}); close the cache and create a new one"
        ) from error


def _differing_runs(old: Sequence[Page], new: Sequence[Page]) -> Iterator[tuple[int, int]]:
    """Yield runs of positions where `old` has a page that `new` does not have there."""
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
