"""Pages under a budget, counted. Room: hold.

One pool may serve several users of a device: what one gives back the next may take. A page may
have several holders, and is free when the last has let it go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from penstock.kv.address_space import Page, Space
from penstock.kv.errors import CacheFull


class PagePool:
    """Makes pages up to a budget and keeps those that are free for the next taker."""

    def __init__(self, space: Space, nbytes: int) -> None:
        self.space = space
        self._lock = threading.Lock()
        self._total = nbytes // space.page_nbytes  # under _lock, as is all below
        self._idle: list[Page] = []
        self._holders: dict[Page, int] = {}

    @property
    def total(self) -> int:
        """Pages the budget allows."""
        return self._total

    @property
    def used(self) -> int:
        """Pages that someone holds."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages that could be taken now, made already or not."""
        return self._total - len(self._holders)

    @property
    def idle(self) -> int:
        """Pages that are made, and so cost memory, while nobody holds them."""
        return len(self._idle)

    def take(self, count: int, *, what: str = "a taker") -> list[Page]:
        """`count` pages with one holder each. All or none: CacheFull, or what the device says."""
        with self._lock:
            if count > self.free:
                raise self._full(what, count)
            taken: list[Page] = []
            try:
                for _ in range(count):
                    taken.append(self._idle.pop() if self._idle else self.space.create())
            except BaseException:
                self._idle.extend(taken)
                raise
            self._holders.update(dict.fromkeys(taken, 1))
            return taken

    def share(self, pages: Iterable[Page]) -> None:
        """One more holder for each."""
        with self._lock:
            for page in pages:
                self._holders[page] += 1

    def give(self, pages: Iterable[Page]) -> None:
        """One holder fewer for each. The giver has unmapped them."""
        with self._lock:
            for page in pages:
                self._holders[page] -= 1
                if self._holders[page] == 0:
                    del self._holders[page]
                    self._idle.append(page)

    def holders(self, page: Page) -> int:
        with self._lock:
            return self._holders[page]

    def resize(self, nbytes: int, *, what: str = "the new budget") -> None:
        """A new budget. What is idle beyond it goes back to the device."""
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
        """Give every page back to the device. Nobody holds one any more, or they are `lost`: held
        by a cache that broke, and mapped nowhere."""
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
