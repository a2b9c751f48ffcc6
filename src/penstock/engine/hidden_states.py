"""Hidden states between blocks: a ring of micro-batches. Room: move.

Forward writes what leaves a block into the next slots of a ring that holds a round and two
micro-batches more, so a slot's old content has two micro-batches of time to leave for its home.
At the turn the head's input becomes the gradient, in place; backward then has two slots left over,
through which inputs come back. An input whose home is the device never enters the ring.
"""

from __future__ import annotations

import torch

from penstock.engine.spans import role_dtype
from penstock.engine.tier_memory import TierMemory
from penstock.plan.buffers import micro_nbytes, round_micro_batches
from penstock.roles import Role

EXTRA = 2
"""Slots beyond a round."""


class Hidden:
    """Slots, and who is in them. Of the thread that computes, but for `home` and `slot`."""

    def __init__(self, homes: TierMemory) -> None:
        plan = homes.plan
        self._homes = homes
        self._width = homes.inventory.hidden
        self._dtype = role_dtype(Role.INPUT, homes.formats)
        self.micro_nbytes = micro_nbytes(homes.inventory, plan.workload)
        self.per_round = round_micro_batches(plan.workload, plan.placement.rounds)
        self.slots = self.per_round + EXTRA
        self._ring = homes.device.empty(self.slots * self.micro_nbytes, "hidden states in flight")
        self._written = 0
        self._turned = 0
        self._occupants: dict[int, tuple[int, int]] = {}
        self._where: dict[tuple[int, int], int] = {}

    @property
    def nbytes(self) -> int:
        return int(self._ring.numel())

    def release(self) -> None:
        self._ring = self._ring.new_empty(0)

    def start_round(self) -> None:
        self._written = 0
        self._occupants.clear()
        self._where.clear()

    # Forward.

    def next_slot(self, block: int, micro: int) -> tuple[int | None, tuple[int, int] | None]:
        """Where the input of `block` goes, and whose input was there before; None: its home."""
        if self._homes.on_device(block, Role.INPUT):
            return None, None
        slot = self._written % self.slots
        self._written += 1
        before = self._occupants.get(slot)
        self._occupants[slot] = (block, micro)
        self._where[block, micro] = slot
        return slot, before

    def slot_of(self, block: int, micro: int) -> int | None:
        """Where the input of `block` is during forward; None: its home."""
        return None if self._homes.on_device(block, Role.INPUT) else self._where[block, micro]

    # Backward.

    def turn(self, micro_batches: int) -> None:
        """The head's input, the last thing written, is where gradients will be."""
        self._turned = self._written - micro_batches

    def gradient_slot(self, micro: int) -> int:
        return (self._turned + micro) % self.slots

    def input_slot(self, count: int) -> int:
        """The slot for the `count`-th input that comes back in this round."""
        return (self._turned + self.per_round + count % EXTRA) % self.slots

    # Bytes.

    def slot(self, index: int, rows: int, length: int) -> torch.Tensor:
        data = self._ring[index * self.micro_nbytes : (index + 1) * self.micro_nbytes]
        return self._shaped(data, rows, length)

    def home(self, block: int, micro: int, rows: int, length: int) -> torch.Tensor:
        """A micro-batch of the block's input where it rests, in host or device memory."""
        data = self._homes.data(block, Role.INPUT)
        return self._shaped(
            data[micro * self.micro_nbytes : (micro + 1) * self.micro_nbytes], rows, length
        )

    def _shaped(self, data: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        flat = data.view(self._dtype)[: rows * length * self._width]
        return flat.view(rows, length, self._width).data  # not one count of changes for the ring
