"""Map pages ahead of need, in a background thread.

Creating, mapping and zeroing a page takes the driver tens of microseconds. That is too long between
two tokens, but costs nothing while the GPU computes. The thread takes a request, claims the slot
under the lock of the `SequenceTable`, works without the lock, and publishes the page under the lock
again. Everyone else who wants the slot waits until the claim ends. An exception in the thread is
raised by the next `prepare`.
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
    """Maps one page at a time for the slots that want more.

    `lock` is the lock of the `SequenceTable`, and guards the slots as well as the fields here.
    `wants` decides, under the lock, whether a slot wants another page.
    """

    def __init__(
        self,
        lock: threading.Condition,
        table: PageTable,
        pool: PagePool,
        wants: Callable[[Slot], bool],
    ) -> None:
        self._lock, self._table, self._pool, self._wants = lock, table, pool, wants
        self._requests: deque[Slot] = deque()  # guarded by _lock, like the four fields below
        self._waiting = 0
        self._failure: BaseException | None = None
        self._closing = False
        self.mapped = 0
        """Number of pages that were mapped before they were needed."""
        self._thread = threading.Thread(target=self._run, name="penstock-kv-growth", daemon=True)
        self._thread.start()

    def request(self, slot: Slot) -> None:
        """Request one more page for a slot, if it wants one. The caller holds the lock."""
        if slot not in self._requests and self._wants(slot):
            self._requests.append(slot)
            self._lock.notify_all()

    def wait_for(self, slots: Iterable[Slot]) -> None:
        """Wait until the thread works on none of these slots. The caller holds the lock.

        The lock is released while waiting. After the return, the thread claims none of the slots
        until the caller releases the lock.
        """
        slots = list(slots)
        if not any(slot.growing for slot in slots):
            return
        # No new claims while someone waits: otherwise the thread could claim one of the slots again
        # before it is done with the next.
        self._waiting += 1
        while any(slot.growing for slot in slots):
            self._lock.wait()
        self._waiting -= 1
        self._lock.notify_all()

    def raise_failure(self) -> None:
        """Raise what went wrong in the thread, once. The caller holds the lock."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise GrowthError(
                f"mapping a page ahead of need failed: {failure}. No tokens were lost; call "
                f"prepare again, which maps the page itself"
            ) from failure

    def close(self) -> None:
        """End the thread. The caller does not hold the lock: the thread needs it to end."""
        with self._lock:
            self._closing = True
            self._requests.clear()
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._pool.space.enter_thread()
            while (claimed := self._claim()) is not None:
                self._grow(*claimed)
        except BaseException as error:  # even a bug here must reach the caller
            with self._lock:
                self._failure = error

    def _claim(self) -> tuple[Slot, Page] | None:
        """Claim the next slot that wants a page, and allocate the page. Return None at the end."""
        with self._lock:
            while not self._closing:
                if not self._requests or self._waiting:
                    self._lock.wait()
                    continue
                slot = self._requests.popleft()
                # Unmapping blank pages would have to wait for the device: `prepare` does it.
                if slot.blanks or not self._wants(slot):
                    continue
                try:
                    # Under the lock, because `prepare` counts the free pages.
                    page = self._pool.allocate(1)[0]
                except CacheFull:
                    continue  # pages ahead of need are not worth reclaiming others
                except Exception as error:
                    self._failure = error
                    continue
                slot.growing = True
                return slot, page
        return None

    def _grow(self, slot: Slot, page: Page) -> None:
        failure = None
        try:
            self._table.map_ahead(slot, page)
        except Exception as error:
            failure = error
        with self._lock:
            slot.growing = False
            if failure is None:
                slot.pages.append(page)
                self.mapped += 1
                self.request(slot)
            else:
                self._pool.release([page])
                self._failure = failure
            self._lock.notify_all()
