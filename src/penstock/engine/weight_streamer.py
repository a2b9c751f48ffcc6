"""Stream weights through the device block by block, for inference.

Generation with weights that do not fit on the device needs neither gradients nor optimizer states:
two slots, each as large as the largest streamed block, and a source that knows where each tensor
lives. Blocks that fit are kept on the device and copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from penstock.checkpoint.merged_weights import MergedWeights
from penstock.checkpoint.model_weights import ModelWeights
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.device import Device
from penstock.engine.state_io import READERS
from penstock.engine.tensor_access import PART
from penstock.memory.arena import Arena
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.roles import Role
from penstock.ticket import Ticket
from penstock.units import round_up

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

ALIGNMENT = 256

Progress = Callable[[int, int, str], None]
"""Called with the number of tensors done, the number of all tensors, and a description."""


class WeightSource(Protocol):
    """A place that holds weights while they are not on the device."""

    def copy(self, tensor: TensorSpec, into: torch.Tensor) -> None:
        """Copy a whole tensor into flat device memory, on the current lane."""


class HostWeights:
    """All weights of a model in host memory, read once from its files.

    `buffers` are those of the model on the device. They are set from the same files. An `adapter`
    in another directory is merged into the weights.
    """

    def __init__(
        self,
        inventory: Inventory,
        folder: Path,
        device: Device,
        dtype: torch.dtype,
        progress: Progress,
        buffers: Mapping[str, torch.Tensor],
        adapter: Path | None = None,
    ) -> None:
        tensors = [tensor for block in inventory.blocks for tensor in block.tensors]
        sizes = [round_up(tensor.elements * dtype.itemsize, ALIGNMENT) for tensor in tensors]
        arena = Arena(sum(sizes), None, device.pinned)
        self._device = device
        self._weights = {t.name: arena.tensor(t.elements, dtype, name=t.name) for t in tensors}
        with (
            _open_weights(folder, inventory, dtype, adapter) as weights,
            BoundedExecutor(READERS) as executor,
        ):
            weights.read_buffers(buffers)
            for done, tensor in enumerate(tensors):
                progress(done, len(tensors), f"reading {tensor.name}")
                executor.submit(partial(self._read, weights, tensor))

    def _read(self, source: ModelWeights | MergedWeights, tensor: TensorSpec) -> None:
        weights = self._weights[tensor.name]
        # In parts: if the file has another type, the conversion needs little memory.
        for low in range(0, tensor.elements, PART):
            high = min(low + PART, tensor.elements)
            weights[low:high].copy_(source.read(tensor, low, high))

    def copy(self, tensor: TensorSpec, into: torch.Tensor) -> None:
        self._device.copy(into, self._weights[tensor.name])


def _open_weights(
    folder: Path, inventory: Inventory, dtype: torch.dtype, adapter: Path | None
) -> ModelWeights | MergedWeights:
    if adapter is None:
        return ModelWeights(folder, inventory, dtype)
    return MergedWeights(adapter, folder, dtype=dtype)


class EngineWeights:
    """The weights of a training engine, between its steps.

    Copies are synchronous: data from NVMe stays in the staging memory only until the next part is
    read.
    """

    def __init__(self, engine: Engine) -> None:
        self._access = engine.access

    def copy(self, tensor: TensorSpec, into: torch.Tensor) -> None:
        start = 0
        for part in self._access.parts(tensor.name, Role.WEIGHT):
            into[start : start + part.numel()].copy_(part)
            start += part.numel()


class WeightStreamer:
    """Two slots for streamed blocks, and the blocks that are kept on the device."""

    def __init__(
        self,
        inventory: Inventory,
        source: WeightSource,
        device: Device,
        dtype: torch.dtype,
        keep: int,
    ) -> None:
        self.inventory, self.device, self.dtype = inventory, device, dtype
        self._source = source
        self._tensors = {t.name: t for block in inventory.blocks for t in block.tensors}
        self.kept = kept_blocks(inventory, dtype, keep)
        sizes = [block_nbytes(inventory, block, dtype) for block in inventory.blocks]
        streamed = [size for index, size in enumerate(sizes) if index not in self.kept]
        slots = [max(streamed, default=0)] * min(2, len(streamed))
        self._slots = [device.empty(size, "a weight slot") for size in slots]
        # Per slot, the end of the computation that last read it.
        self._last_use: list[Ticket[None] | None] = [None] * len(slots)
        self._next_slot = 0
        self._fetched: dict[int, tuple[dict[str, nn.Parameter], Ticket[None]]] = {}
        for index in self.kept:
            memory = device.empty(sizes[index], "weights that stay on the device")
            self._fetched[index] = self._copy_block(index, memory)
        self.streamed_nbytes = sum(streamed)
        """Number of bytes copied to the device in one forward pass."""

    def fetch(self, block: int) -> None:
        """Start copying a block to the device, unless it is there."""
        if block in self._fetched or not 0 <= block < len(self.inventory.blocks):
            return
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._slots)
        last_use = self._last_use[slot]
        with self.device.lane("fetch"):
            if last_use is not None:  # overwrite the slot only after its last reader
                self.device.order_after(last_use)
            self._fetched[block] = self._copy_block(block, self._slots[slot])

    def wait(self, block: int) -> Mapping[str, nn.Parameter]:
        """Return a block's parameters; work issued next on this lane starts after their arrival."""
        self.fetch(block)
        parameters, arrived = self._fetched[block]
        self.device.order_after(arrived)
        return parameters

    def drop(self, block: int) -> None:
        """Release a block's slot, after all computations that use it have been issued."""
        if block not in self.kept:
            parameters, _ = self._fetched.pop(block)
            first = next(iter(parameters.values()))
            slot = next(i for i, s in enumerate(self._slots) if s.data_ptr() == first.data_ptr())
            self._last_use[slot] = self.device.record()

    @property
    def nbytes(self) -> int:
        """Device memory of the slots in bytes."""
        return sum(slot.numel() for slot in self._slots)

    def close(self) -> None:
        nbytes = self.nbytes
        self._fetched.clear()
        self._slots.clear()
        self.device.release(nbytes)

    def _copy_block(
        self, index: int, memory: torch.Tensor
    ) -> tuple[dict[str, nn.Parameter], Ticket[None]]:
        parameters, offset = {}, 0
        for tensor in self._used_tensors(self.inventory.blocks[index]):
            nbytes = tensor.elements * self.dtype.itemsize
            flat = memory[offset : offset + nbytes].view(self.dtype)
            self._source.copy(tensor, flat)
            parameters[tensor.name] = nn.Parameter(flat.view(tensor.shape), requires_grad=False)
            offset += round_up(nbytes, ALIGNMENT)
        return parameters, self.device.record()

    def _used_tensors(self, block: Block) -> Iterable[TensorSpec]:
        return [*block.tensors, *(self._tensors[name] for name in block.borrows)]


def block_nbytes(inventory: Inventory, block: Block, dtype: torch.dtype) -> int:
    """Return the device memory of a block's weights, borrowed (tied) tensors included."""
    borrowed = {t.name: t for b in inventory.blocks for t in b.tensors if t.name in block.borrows}
    tensors = [*block.tensors, *borrowed.values()]
    return sum(round_up(t.elements * dtype.itemsize, ALIGNMENT) for t in tensors)


def kept_blocks(inventory: Inventory, dtype: torch.dtype, room: int) -> frozenset[int]:
    """Choose the blocks to keep on the device within `room` bytes, slots not included.

    The head comes first and then the embedding, which are often the largest and determine the size
    of the slots; then layers from the front, since all layers are alike.
    """
    head = len(inventory.blocks) - 1
    kept = set()
    for index in (head, *range(head)):
        nbytes = block_nbytes(inventory, inventory.blocks[index], dtype)
        if nbytes <= room:
            kept.add(index)
            room -= nbytes
    return frozenset(kept)
