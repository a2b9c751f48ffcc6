"""A pool of pages under a budget.

Several caches of one device may share a pool: pages that one releases, another may allocate. A page
may have several holders, and is free when the last of them has released it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from penstock.kv.address_space import Page, Space
from penstock.kv.errors import CacheFull


class PagePool:
    """Creates pages up to a budget of `nbytes`, and keeps free ones for reuse."""

    def __init__(self, space: Space, nbytes: int) -> None:
        self.space = space
        self._lock = threading.Lock()
        self._total = nbytes // space.page_nbytes  # guarded by _lock, like the fields below
        self._idle: list[Page] = []
        self._holders: dict[Page, int] = {}

    @property
    def total(self) -> int:
        """Number of pages that the budget allows."""
        return self._total

    @property
    def used(self) -> int:
        """Number of pages that someone holds."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Number of pages that could be allocated now, whether they exist already or not."""
        return self._total - len(self._holders)

    @property
    def idle(self) -> int:
        """Number of pages that exist, and so cost memory, but have no holder."""
        return len(self._idle)

    def allocate(self, count: int, *, what: str = "an allocation") -> list[Page]:
        """Allocate `count` pages with one holder each.

        Allocates all of them or none: raises CacheFull, or the error of the device.
        """
        with self._lock:
            if count > self.free:
                raise self._full(what, count)
            pages: list[Page] = []
            try:
                for _ in range(count):
                    pages.append(self._idle.pop() if self._idle else self.space.create())
            except BaseException:
                self._idle.extend(pages)
                raise
            self._holders.update(dict.fromkeys(pages, 1))
            return pages

    def share(self, pages: Iterable[Page]) -> None:
        """Add one holder to each page."""
        with self._lock:
            for page in pages:
                self._holders[page] += 1

    def release(self, pages: Iterable[Page]) -> None:
        """Remove one holder from each page. The holder must have unmapped them."""
        with self._lock:
            for page in pages:
                self._holders[page] -= 1
                if self._holders[page] == 0:
                    del self._holders[page]
                    self._idle.append(page)

    def holders(self, page: Page) -> int:
        """Return how many holders a page has."""
        with self._lock:
            return self._holders[page]

    def resize(self, nbytes: int, *, what: str = "the new budget") -> None:
        """Set a new budget. Idle pages beyond it are returned to the device."""
        total = nbytes // self.space.page_nbytes
        with self._lock:
            if total < self.used:
                raise CacheFull(
                    what=what,
                    wanted=self.used - total,
                    free=0,
                    budget=self._total,
                    page=self.space.page_nbytes,
                )
            self._total = total
            while self._idle and len(self._idle) + self.used > total:
                self.space.destroy(self._idle.pop())

    def close(self, *, lost: bool = False) -> None:
        """Return every page to the device.

        Nobody may hold a page any more, unless pages are `lost`: held by a cache that broke, and
        mapped nowhere.
        """
        with self._lock:
            assert lost or not self._holders, f"{len(self._holders)} pages are still held"
            self._idle.extend(self._holders)
            self._holders.clear()
            while self._idle:
                self.space.destroy(self._idle.pop())

    def _full(self, what: str, wanted: int) -> CacheFull:
        return CacheFull(
            what=what,
            wanted=wanted,
            free=self.free,
            budget=self._total,
            page=self.space.page_nbytes,
        )
