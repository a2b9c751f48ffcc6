"""Weights of blocks on the device, as parameters that modules compute with. Room: move."""

from __future__ import annotations

import torch
from torch import nn

from penstock.engine.spans import Span, role_dtype
from penstock.model.inventory import Inventory, TensorSpec
from penstock.roles import Formats, Role


class WeightSlots:
    """Views of flat buffers, made once for each place a block is ever in."""

    def __init__(self, inventory: Inventory, formats: Formats, pool: torch.Tensor) -> None:
        self._inventory, self._formats, self._pool = inventory, formats, pool
        self._made: dict[tuple[int, int], dict[str, nn.Parameter]] = {}

    def release(self) -> None:
        self._made.clear()
        self._pool = self._pool.new_empty(0)

    def data(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the pool."""
        return self._pool[offset : offset + nbytes]

    def span(self, block: int, offset: int) -> Span:
        model = self._inventory.blocks[block]
        count = model.flat_elements(True) + model.flat_elements(False)
        nbytes = count * role_dtype(Role.WEIGHT, self._formats).itemsize
        return Span(Role.WEIGHT, self.data(offset, nbytes), 0, count, self._formats)

    def parameters(self, block: int, weights: Span) -> dict[str, nn.Parameter]:
        """The block's tensors by name, over `weights`."""
        key = (block, weights.data.data_ptr())
        if key not in self._made:
            self._made[key] = dict(self._make(block, weights))
        return self._made[key]

    def stand_ins(self, block: int) -> dict[str, nn.Parameter]:
        """Zeros that take no memory, for backward of what is linear in its weights."""
        key = (block, -1)
        if key not in self._made:
            zero = torch.zeros((), dtype=role_dtype(Role.WEIGHT, self._formats)).to(
                self._pool.device
            )
            self._made[key] = {
                t.name: self._parameter(t, zero.expand(t.shape))
                for t in self._inventory.blocks[block].tensors
            }
        return self._made[key]

    def _make(self, block: int, weights: Span) -> list[tuple[str, nn.Parameter]]:
        model = self._inventory.blocks[block]
        made = []
        for tensor in model.tensors:
            shift = 0 if tensor.trainable else model.flat_elements(True)
            at = shift + model.offsets(tensor.trainable)[tensor.name]
            flat = weights.values(at, at + tensor.elements)
            made.append((tensor.name, self._parameter(tensor, flat.view(tensor.shape))))
        return made

    def _parameter(self, tensor: TensorSpec, data: torch.Tensor) -> nn.Parameter:
        # `.data`: views of one pool share a count of changes, and autograd would take a block's
        # arrival for a change to its neighbour.
        return nn.Parameter(data.data, requires_grad=tensor.trainable)
