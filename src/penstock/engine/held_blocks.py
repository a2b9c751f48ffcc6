"""Weights and gradient sums in device memory that the code of a caller computes with.

If the caller computes the loss (`penstock.stream`), the head's weights must be ordinary tensors on
the device between a forward pass and its backward pass, and so must a tied embedding's. They have
memory of their own, unless the plan stores them on the device anyway. What autograd computes as
their gradients is added up here, in fp32, until the update.
"""

from __future__ import annotations

import torch
from torch import nn

from penstock.engine.gradients import add_in_order
from penstock.engine.spans import Span, view_parameters
from penstock.engine.tier_memory import TierMemory
from penstock.plan.buffers import held_sum_nbytes, held_weight_nbytes
from penstock.roles import Role


class HeldBlocks:
    """The held blocks of an engine; none if the engine computes the loss itself."""

    def __init__(self, tiers: TierMemory, blocks: frozenset[int]) -> None:
        self._tiers, self.blocks = tiers, blocks
        placement = tiers.plan.placement
        sizes = {block: held_weight_nbytes(placement, block) for block in sorted(blocks)}
        memory = tiers.device.empty(sum(sizes.values()), "head weights")
        self._weights: dict[int, Span] = {}
        for block, nbytes in sizes.items():
            if nbytes:
                spec = tiers.inventory.blocks[block]
                # The trained tensors of a split block are on the device, and never move.
                first = spec.flat_elements(True) if tiers.is_split(block) else 0
                count = spec.flat_elements(True) + spec.flat_elements(False) - first
                data, memory = memory[:nbytes], memory[nbytes:]
                self._weights[block] = Span(Role.WEIGHT, data, first, count, tiers.formats)
            else:
                self._weights[block] = tiers.span(block, Role.WEIGHT)
        sizes = {
            block: held_sum_nbytes(tiers.inventory, placement, block) for block in sorted(blocks)
        }
        memory = tiers.device.empty(sum(sizes.values()), "head gradients")
        self._sums: dict[int, torch.Tensor] = {}
        for block, nbytes in sizes.items():
            self._sums[block], memory = memory[:nbytes], memory[nbytes:]
        self._owner = {t.name: b for b in blocks for t in tiers.inventory.blocks[b].tensors}
        self.untouched: dict[int, set[str]] = {}
        """By block: tensors without a gradient yet. Their sums hold old data."""
        self.forget_gradients()

    def release(self) -> None:
        self._weights.clear()
        self._sums.clear()

    # Weights.

    def span(self, block: int) -> Span:
        """Return the weights of a held block."""
        return self._weights[block]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return new parameters that share the memory of the held weights, by name."""
        found: dict[str, nn.Parameter] = {}
        for block in sorted(self.blocks):
            split = self._tiers.is_split(block)
            trained = self._tiers.span(block, Role.WEIGHT) if split else None
            spec = self._tiers.inventory.blocks[block]
            found |= view_parameters(spec, self._weights[block], trained)
        return found

    # Gradients.

    def sum(self, block: int) -> torch.Tensor:
        """Return the fp32 sum of a block's gradient."""
        elements = self._tiers.inventory.blocks[block].flat_elements(True)
        data = self._sums[block]
        if not data.numel():
            data = self._tiers.data(block, Role.GRADIENT)
        return data[: 4 * elements].view(torch.float32)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a tensor, of one backward pass."""
        block = self._owner[name]
        fresh = name in self.untouched[block]
        add_in_order(self._view(block, name), [gradient], fresh=fresh)
        self.untouched[block].discard(name)

    def complete_gradients(self) -> dict[int, torch.Tensor]:
        """Return the bytes of the sums to store elsewhere; tensors without a gradient get zeros."""
        for block, names in self.untouched.items():
            for name in names:
                self._view(block, name).zero_()
            self._unused |= names
            names.clear()
        return {b: self.sum(b).view(torch.uint8) for b, data in self._sums.items() if data.numel()}

    @property
    def without_gradient(self) -> set[str]:
        """Names of trained tensors that have got no gradient."""
        return self._unused.union(*self.untouched.values())

    def forget_gradients(self) -> None:
        """Start from new gradients."""
        self._unused: set[str] = set()  # that have been completed with zeros
        self.untouched = {
            block: {t.name for t in self._tiers.inventory.blocks[block].tensors if t.trainable}
            for block in self.blocks
        }

    def _view(self, block: int, name: str) -> torch.Tensor:
        spec = self._tiers.inventory.blocks[block]
        start = spec.offsets(True)[name]
        tensor = next(t for t in spec.tensors if t.name == name)
        return self.sum(block)[start : start + tensor.elements].view(tensor.shape)
