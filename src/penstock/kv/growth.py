"""Pages mapped ahead of need, by a thread beside the one that computes. Room: hold.

Making, mapping and zeroing a page takes the driver tens of microseconds: too long between two
tokens, nothing beside one. The thread takes a wish, claims the slot under the keeper's lock, works
without the lock, and publishes under it. Whoever else wants that slot waits for the claim to end.
It waits on a condition, ends when told to, and an exception in it is raised at the next `prepare`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from penstock.kv.address_space import Page
from penstock.kv.errors import CacheFull, GrowthError
from penstock.kv.page_pool import PagePool
from penstock.kv.page_table import PageTable
from penstock.kv.slots import Slot


class Grower:
    """Maps one page at a time behind the slots that wish for it."""

    def __init__(
        self,
        lock: threading.Condition,
        table: PageTable,
        pool: PagePool,
        wants: Callable[[Slot], bool],
    ) -> None:
        self._lock, self._table, self._pool, self._wants = lock, table, pool, wants
        self._wishes: deque[Slot] = deque()  # under _lock, as are the four below
        self._waiting = 0
        self._failure: BaseException | None = None
        self._closing = False
        self.mapped = 0
        """Pages that were there before they were asked for."""
        self._thread = threading.Thread(target=self._run, name="penstock-kv-growth", daemon=True)
        self._thread.start()

    def wish(self, slot: Slot) -> None:
        """Ask for one more page behind a slot, if it still wants one then. Under the lock."""
        if slot not in self._wishes and self._wants(slot):
            self._wishes.append(slot)
            self._lock.notify_all()

    def still(self, slots: Iterable[Slot]) -> None:
        """Return when the thread has let go of all these slots at once. Under the lock, which it
        gives up meanwhile; until the caller gives it up again, the thread claims none of them."""
        slots = list(slots)
        if not any(slot.growing for slot in slots):
            return
        self._waiting += 1  # no new claims, or one slot is still when the next no longer is
        while any(slot.growing for slot in slots):
            self._lock.wait()
        self._waiting -= 1
        self._lock.notify_all()

    def raise_failure(self) -> None:
        """Raise what went wrong in the thread, once. Under the lock."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise GrowthError(
                f"growing the cache ahead of need failed: {failure}. Nothing was lost; prepare "
                f"again and the page is asked for at once"
            ) from failure

    def close(self) -> None:
        """End the thread. Not under the lock: the thread needs it to end."""
        with self._lock:
            self._closing = True
            self._wishes.clear()
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._pool.space.enter_thread()
            while (claimed := self._claim()) is not None:
                self._grow(*claimed)
        except BaseException as failed:  # a mistake of ours must not end as silence
            with self._lock:
                self._failure = failed

    def _claim(self) -> tuple[Slot, Page] | None:
        """The next slot that wants a page, claimed, and the page; None at the end."""
        with self._lock:
            while not self._closing:
                if not self._wishes or self._waiting:
                    self._lock.wait()
                    continue
                slot = self._wishes.popleft()
                # Unmapping blanks would have to wait for the device: left to `prepare`.
                if slot.blanks or not self._wants(slot):
                    continue
                try:
                    page = self._pool.take(1)[0]  # under the lock: `prepare` counts what is free
                except CacheFull:
                    continue  # what is ahead of need is never worth taking from others
                except Exception as failed:
                    self._failure = failed
                    continue
                slot.growing = True
                return slot, page
        return None

    def _grow(self, slot: Slot, page: Page) -> None:
        failure = None
        try:
            self._table.map_ahead(slot, page)
        except Exception as failed:
            failure = failed
        with self._lock:
            slot.growing = False
            if failure is None:
                slot.pages.append(page)
                self.mapped += 1
                self.wish(slot)
            else:
                self._pool.give([page])
                self._failure = failure
            self._lock.notify_all()
