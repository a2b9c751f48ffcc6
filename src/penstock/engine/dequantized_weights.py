"""The weights of the block that computes, if they are quantized where they are stored.

Quantized weights are stored, fetched and kept in weight slots as they are. Before a block computes,
its weights are dequantized into memory that all blocks share: once for all micro-batches of a
round, in forward and again in backward. It happens on the lane that computes, so that the block
before has been computed when its weights are overwritten.
"""

from __future__ import annotations

import torch

from penstock.engine.device import Device
from penstock.model.inventory import Inventory
from penstock.model.meta_model import weight_dtype
from penstock.model.quantize import dequantize
from penstock.packed_weights import PackedLayout
from penstock.plan.buffers import dequantized_nbytes
from penstock.roles import TENSOR_ALIGNMENT, Formats
from penstock.units import round_up


class DequantizedWeights:
    """Device memory for the dequantized weights of one block."""

    def __init__(
        self, inventory: Inventory, formats: Formats, device: Device, *, compiled: bool
    ) -> None:
        self._inventory, self._dtype = inventory, weight_dtype(formats.dtype)
        self._compiled = compiled
        sizes = dequantized_nbytes(inventory, formats)
        # Two allocations: the compiler refuses to write to one view of memory and to read another
        # view of the same memory that has another type.
        self._weights, self._scratch = (device.empty(n, "dequantized weights") for n in sizes)
        self._block: int | None = None  # whose weights are there

    def release(self) -> None:
        """Drop the memory."""
        self._weights = self._scratch = self._weights.new_empty(0)

    def forget(self) -> None:
        """Note that stored weights may have changed."""
        self._block = None

    def views(self, block: int) -> dict[str, torch.Tensor]:
        """Return flat views for the quantized tensors of a block, by name."""
        found, at = {}, 0
        weights = self._weights.view(self._dtype)
        for tensor in self._inventory.blocks[block].quantized:
            found[tensor.name] = weights[at : at + tensor.elements]
            at += round_up(tensor.elements, TENSOR_ALIGNMENT)
        return found

    @torch.no_grad()
    def update(self, block: int, stored: dict[str, torch.Tensor]) -> None:
        """Dequantize the weights of a block, unless they are there; `stored` has their bytes.

        They never change in a step: the backward of the last layer needs what its forward used.
        """
        tensors = self._inventory.blocks[block].quantized
        if not tensors or self._block == block:
            return
        self._block = block
        views = self.views(block)
        for tensor in tensors:
            assert tensor.quantization is not None
            packed = stored[tensor.name][: PackedLayout(tensor.elements).nbytes]
            dequantize(
                packed, tensor.quantization, views[tensor.name], self._scratch,
                compiled=self._compiled,
            )  # fmt: skip
