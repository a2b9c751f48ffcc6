"""Hidden states between blocks: a ring of micro-batches in device memory.

Forward writes the output of a block, which is the input of the next, into the next slots of the
ring. The ring holds one round plus two micro-batches, so the old content of a slot has the time of
two micro-batches to be offloaded. When backward starts, the head's input is overwritten with its
gradient, in place. Backward then needs one round of slots for gradients and has two slots left
over, through which the saved block inputs (activations) return. A block input that the plan keeps
on the device is written there directly and never enters the ring.
"""

from __future__ import annotations

import torch

from penstock.engine.spans import role_dtype
from penstock.engine.tier_memory import TierMemory
from penstock.plan.buffers import micro_batches_per_round, micro_nbytes
from penstock.roles import Role

EXTRA_SLOTS = 2
"""Slots of the ring beyond one round of micro-batches."""


class HiddenStates:
    """The ring's slots and what they hold.

    Any thread may call `slot` and `home`; everything else belongs to the computing thread.
    """

    def __init__(self, tiers: TierMemory) -> None:
        plan = tiers.plan
        self._tiers = tiers
        self._width = tiers.inventory.hidden
        self._dtype = role_dtype(Role.ACTIVATION, tiers.formats)
        self.micro_nbytes = micro_nbytes(tiers.inventory, plan.workload)
        self.per_round = micro_batches_per_round(plan.workload, plan.placement.rounds)
        self.slots = self.per_round + EXTRA_SLOTS
        self._ring = tiers.device.empty(self.slots * self.micro_nbytes, "hidden states in flight")
        self._keeps = True
        self._written = 0  # micro-batches written in this round
        self._head_input = 0  # how many were written before the head's input
        self._occupants: dict[int, tuple[int, int]] = {}  # slot -> (block, micro-batch)
        self._slot_of: dict[tuple[int, int], int] = {}

    def release(self) -> None:
        self._ring = self._ring.new_empty(0)

    def start_round(self, *, keeps: bool = True) -> None:
        """Start a forward pass. Without `keeps`, all hidden states stay in the ring.

        Block inputs in device memory are not overwritten then: a forward pass that has not had its
        backward pass yet may need them.
        """
        self._keeps = keeps
        self._written = 0
        self._occupants.clear()
        self._slot_of.clear()

    # Forward.

    def next_slot(self, block: int, micro: int) -> tuple[int | None, tuple[int, int] | None]:
        """Return the slot for an input of `block`, and the (block, micro-batch) it replaces.

        The slot is None if the plan keeps the block's input on the device.
        """
        if self._stays(block):
            return None, None
        slot = self._written % self.slots
        self._written += 1
        previous = self._occupants.get(slot)
        self._occupants[slot] = (block, micro)
        self._slot_of[block, micro] = slot
        return slot, previous

    def slot_of(self, block: int, micro: int) -> int | None:
        """Return the slot of an input of `block` during forward; None if it is not in the ring."""
        return None if self._stays(block) else self._slot_of[block, micro]

    def _stays(self, block: int) -> bool:
        return self._keeps and self._tiers.on_device(block, Role.ACTIVATION)

    # Backward.

    def start_backward(self, micro_batches: int) -> None:
        """Let gradients take the slots of the head's input, which was written last."""
        self._head_input = self._written - micro_batches

    def start_separate_backward(self) -> None:
        """Let gradients take the first slots: a backward pass finds nothing in the ring."""
        self._head_input = 0

    def gradient_slot(self, micro: int) -> int:
        return (self._head_input + micro) % self.slots

    def activation_slot(self, count: int) -> int:
        """Return the slot for the `count`-th activation that returns in this round."""
        return (self._head_input + self.per_round + count % EXTRA_SLOTS) % self.slots

    # Views.

    def slot(self, index: int, rows: int, length: int) -> torch.Tensor:
        """Return a slot's hidden states, for `rows` sequences of `length` tokens."""
        data = self._ring[index * self.micro_nbytes : (index + 1) * self.micro_nbytes]
        return self._view(data, rows, length)

    def home(self, block: int, micro: int, rows: int, length: int) -> torch.Tensor:
        """Return a micro-batch of the block's input where it lives, in host or device memory.

        `micro` counts the micro-batches of all forward passes whose inputs are kept.
        """
        data = self._tiers.data(block, Role.ACTIVATION)
        start = micro * self.micro_nbytes
        return self._view(data[start : start + self.micro_nbytes], rows, length)

    def _view(self, data: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        flat = data.view(self._dtype)[: rows * length * self._width]
        # `.data`: each view needs a version counter of its own, or autograd would take a write to
        # one slot for a change of all others.
        return flat.view(rows, length, self._width).data
