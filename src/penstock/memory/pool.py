"""The staging pool: slots through which tensors pass between tiers. Room: hold.

All of it is taken when the pool is made. A slot may share bytes with others whose tensors live at
other times; `take` waits until whoever has them is done, and that includes the copy or I/O that
was still using them when they were given back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import PenstockError
from penstock.memory.arena import Arena
from penstock.packing import Packing
from penstock.units import format_bytes

SLICE = 0.05
"""Seconds between two looks at tickets and at Python's signals."""


class Finishing(Protocol):
    """Work that still uses a slot: a store's ticket, a copy's event."""

    @property
    def done(self) -> bool:
        """True once the work no longer touches the bytes, whether or not it succeeded."""

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for that. False if the time ran out first."""


class SlotHeldError(PenstockError, TimeoutError):
    """A slot did not become free in time."""

    def __init__(self, name: str, holders: Mapping[str, str], seconds: float) -> None:
        self.name, self.holders, self.seconds = name, dict(holders), seconds
        who = ", ".join(f"{holder} ({state})" for holder, state in holders.items())
        super().__init__(
            f"the slot of {name} was not free after {seconds:g} s: its bytes are held by {who}; "
            f"the schedule takes {name} before it has given those back"
        )


class SlotError(PenstockError, ValueError):
    """A slot that is not there, taken twice, or given back twice."""


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor's bytes in the pool."""

    name: str
    offset: int
    view: memoryview
    """The bytes, made once with the pool."""
    rivals: list[Slot] = field(default_factory=list, repr=False)
    """Slots that share bytes with this one."""
    taken: bool = False
    last: Finishing | None = None
    """What used the bytes last, while it may still do so."""

    @property
    def state(self) -> str:
        """Empty when free."""
        if self.taken:
            return "in use"
        if self.last is not None and not self.last.done:
            return f"given back, but {self.last!r} still uses it"
        self.last = None
        return ""


class StagingPool:
    """Slots laid out by a packing, in one block of an arena. Safe to use from several threads."""

    def __init__(self, packing: Packing, arena: Arena | None = None, *, align: int = 4096) -> None:
        self.packing = packing
        arena = arena or Arena(packing.nbytes)
        self._block = arena.take(packing.nbytes, align=align, name="the staging pool")
        whole = memoryview(self._block)
        self._slots = {
            name: Slot(name, offset, whole[offset : offset + packing.sizes[name]])
            for name, offset in packing.offsets.items()
        }
        _introduce(list(self._slots.values()))
        self._changed = threading.Condition()  # guards every slot's state

    def take(self, name: str, timeout: float | None = None) -> Slot:
        """The tensor's slot, once nobody else uses its bytes. Raises SlotHeldError."""
        slot = self._slot(name)
        began = time.monotonic()
        with self._changed:
            if slot.taken:
                raise SlotError(f"the slot of {name} is taken already; give it back first")
            while holders := self._holders(slot):
                waited = time.monotonic() - began
                if timeout is not None and waited >= timeout:
                    names = {holder.name: holder.state for holder in holders}
                    raise SlotHeldError(name, names, timeout)
                # In slices: a ticket does not tell the pool when it is done, and Ctrl-C must work.
                self._wait_for(holders)
            slot.taken = True
            return slot

    def give(self, slot: Slot, after: Finishing | None = None) -> None:
        """Back to the pool, for the next tensor once `after` is done."""
        with self._changed:
            if not slot.taken:
                raise SlotError(f"the slot of {slot.name} is not taken")
            slot.taken = False
            slot.last = after
            self._changed.notify_all()

    def holders(self, name: str) -> dict[str, str]:
        """Who keeps a tensor from its slot, and how; empty if it is free."""
        with self._changed:
            return {holder.name: holder.state for holder in self._holders(self._slot(name))}

    @property
    def nbytes(self) -> int:
        """All the memory there is, from start to end."""
        return self._block.nbytes

    @property
    def address(self) -> int:
        return self._block.address

    def __repr__(self) -> str:
        with self._changed:
            used = sum(slot.view.nbytes for slot in self._slots.values() if slot.state)
        return f"StagingPool({format_bytes(used)} of {format_bytes(self.nbytes)} in use)"

    def _slot(self, name: str) -> Slot:
        try:
            return self._slots[name]
        except KeyError:
            raise SlotError(f"no slot was planned for {name}") from None

    def _holders(self, slot: Slot) -> list[Slot]:
        return [rival for rival in (slot, *slot.rivals) if rival.state]

    def _wait_for(self, holders: list[Slot]) -> None:
        pending = next((h.last for h in holders if not h.taken and h.last is not None), None)
        if pending is None:
            self._changed.wait(SLICE)
            return
        self._changed.release()  # others may give their slots back meanwhile
        try:
            pending.settle(SLICE)
        finally:
            self._changed.acquire()


def _introduce(slots: list[Slot]) -> None:
    """Tell each slot which others share bytes with it."""
    slots.sort(key=lambda slot: slot.offset)
    for number, slot in enumerate(slots):
        end = slot.offset + slot.view.nbytes
        for other in slots[number + 1 :]:
            if other.offset >= end:
                break
            slot.rivals.append(other)
            other.rivals.append(slot)
