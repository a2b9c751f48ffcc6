"""Weights that pass through the device block by block, for looking only. Room: move.

Generating over weights that rest elsewhere needs neither gradients nor states: two slots, each as
large as the largest block, and a source that says where a tensor is. What fits is kept on the
device and passes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from penstock.checkpoint.reader import ShardReader
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.device import Device, Mark
from penstock.engine.state_io import READERS, elements_of, names_in
from penstock.engine.tensor_access import PART
from penstock.memory.arena import Arena
from penstock.model.inventory import Block, Inventory, TensorSpec
from penstock.roles import Role
from penstock.units import round_up

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

ALIGNMENT = 256

Tell = Callable[[int, int, str], None]


class Source(Protocol):
    """Where weights rest."""

    def copy(self, tensor: TensorSpec, into: torch.Tensor) -> None:
        """The whole tensor into flat device memory, on the current lane."""


class HostWeights:
    """All weights of a model in host memory, read once from its files."""

    def __init__(
        self, inventory: Inventory, folder: Path, device: Device, dtype: torch.dtype, tell: Tell
    ) -> None:
        tensors = [tensor for block in inventory.blocks for tensor in block.tensors]
        each = [round_up(tensor.elements * dtype.itemsize, ALIGNMENT) for tensor in tensors]
        arena = Arena(sum(each), None, device.pinned)
        self._device = device
        self._held = {t.name: arena.tensor(t.elements, dtype, name=t.name) for t in tensors}
        with ShardReader(folder) as shards, BoundedExecutor(READERS) as crew:
            names = names_in(shards, inventory)
            for done, tensor in enumerate(tensors):
                tell(done, len(tensors), f"reading {tensor.name}")
                crew.start(partial(self._read, shards, names[tensor.name], tensor))

    def _read(self, shards: ShardReader, name: str, tensor: TensorSpec) -> None:
        """In parts, so that another type than the file's takes little memory on the way."""
        held = self._held[tensor.name]
        for low in range(0, tensor.elements, PART):
            high = min(low + PART, tensor.elements)
            held[low:high].copy_(elements_of(shards, name, tensor, low, high))

    def copy(self, tensor: TensorSpec, into: torch.Tensor) -> None:
        self._device.copy(into, self._held[tensor.name])


class EngineWeights:
    """An engine's weights, between its steps. Copies stop the host: what comes from a disk lies in
    staging only until the next part is read."""

    def __init__(self, engine: Engine) -> None:
        self._access = engine.access

    def copy(self, tensor: TensorSpec, into: torch.Tensor) -> None:
        at = 0
        for part in self._access.parts(tensor.name, Role.WEIGHT):
            into[at : at + part.numel()].copy_(part)
            at += part.numel()


class WeightStreamer:
    """Two slots, and the blocks that stay."""

    def __init__(
        self, inventory: Inventory, source: Source, device: Device, dtype: torch.dtype, keep: int
    ) -> None:
        self.inventory, self.device, self.dtype = inventory, device, dtype
        self._source = source
        self._tensors = {t.name: t for block in inventory.blocks for t in block.tensors}
        self.kept = kept_blocks(inventory, dtype, keep)
        sizes = [self._nbytes(block) for block in inventory.blocks]
        passing = [size for at, size in enumerate(sizes) if at not in self.kept]
        slots = [max(passing, default=0)] * min(2, len(passing))
        self._slots = [device.empty(size, "a slot for weights") for size in slots]
        self._done: list[Mark | None] = [None] * len(slots)
        self._turn = 0
        self._ready: dict[int, tuple[dict[str, nn.Parameter], Mark]] = {}
        for at in self.kept:
            self._ready[at] = self._bring(at, device.empty(sizes[at], "weights that stay"))
        self.passing_nbytes = sum(passing)
        """What crosses to the device in one pass."""

    def fetch(self, block: int) -> None:
        """Begin to bring a block, unless it is there."""
        if block in self._ready or not 0 <= block < len(self.inventory.blocks):
            return
        slot = self._turn
        self._turn = (slot + 1) % len(self._slots)
        before = self._done[slot]
        with self.device.lane("fetch"):
            if before is not None:
                self.device.wait(before)
            self._ready[block] = self._bring(block, self._slots[slot])

    def wait(self, block: int) -> Mapping[str, nn.Parameter]:
        """Its tensors by name; what is computed next comes after their arrival."""
        self.fetch(block)
        parameters, arrived = self._ready[block]
        self.device.wait(arrived)
        return parameters

    def drop(self, block: int) -> None:
        """All that computes with it was issued."""
        if block not in self.kept:
            parameters, _ = self._ready.pop(block)
            first = next(iter(parameters.values()))
            slot = next(i for i, s in enumerate(self._slots) if s.data_ptr() == first.data_ptr())
            self._done[slot] = self.device.mark()

    @property
    def nbytes(self) -> int:
        """What the slots take of the device."""
        return sum(slot.numel() for slot in self._slots)

    def close(self) -> None:
        nbytes = self.nbytes
        self._ready.clear()
        self._slots.clear()
        self.device.returned(nbytes)

    def _bring(self, at: int, memory: torch.Tensor) -> tuple[dict[str, nn.Parameter], Mark]:
        made, offset = {}, 0
        for tensor in self._of(self.inventory.blocks[at]):
            nbytes = tensor.elements * self.dtype.itemsize
            flat = memory[offset : offset + nbytes].view(self.dtype)
            self._source.copy(tensor, flat)
            made[tensor.name] = nn.Parameter(flat.view(tensor.shape), requires_grad=False)
            offset += round_up(nbytes, ALIGNMENT)
        return made, self.device.mark()

    def _of(self, block: Block) -> Iterable[TensorSpec]:
        return [*block.tensors, *(self._tensors[name] for name in block.borrows)]

    def _nbytes(self, block: Block) -> int:
        return block_nbytes(self.inventory, block, self.dtype)


def block_nbytes(inventory: Inventory, block: Block, dtype: torch.dtype) -> int:
    """What a block takes on the device, borrowed tensors included."""
    lent = {t.name: t for b in inventory.blocks for t in b.tensors if t.name in block.borrows}
    every = [*block.tensors, *lent.values()]
    return sum(round_up(t.elements * dtype.itemsize, ALIGNMENT) for t in every)


def kept_blocks(inventory: Inventory, dtype: torch.dtype, room: int) -> frozenset[int]:
    """Which blocks stay, if `room` bytes may be used beside the slots: from the front, for all
    layers are alike, but the head and the embedding first, which are often the largest."""
    last = len(inventory.blocks) - 1
    kept = set()
    for at in (last, *range(last)):
        nbytes = block_nbytes(inventory, inventory.blocks[at], dtype)
        if nbytes <= room:
            kept.add(at)
            room -= nbytes
    return frozenset(kept)
