"""A sequence's tokens go to host memory and come back. Room: hold."""

from __future__ import annotations

import torch

from penstock.kv import reclaiming
from penstock.kv.errors import SequenceError
from penstock.kv.keeper import Keeper
from penstock.kv.slots import Sequence
from penstock.memory.arena import Arena


def preempt(keeper: Keeper, sequence: Sequence) -> int:
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


def restore(keeper: Keeper, sequence: Sequence) -> None:
    """Bring a sequence back into a slot. CacheFull or NoSlot leave it where it is."""
    with keeper.whole():
        if sequence.finished or sequence.resident:
            state = "is finished" if sequence.finished else "is in its slot already"
            raise SequenceError(f"a sequence that {state} cannot be restored")
        length = sequence.length
        slot = reclaiming.best_fit(keeper, keeper.layout.pages_for(length))
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
