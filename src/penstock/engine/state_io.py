"""Weights and optimizer states to and from safetensors, tensor by tensor. Room: move.

Files know nothing of the plan: every tensor is whole and under its own name, so what one plan
wrote another can read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.writer import Progress, ShardWriter, TensorOut
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.initial_weights import set_master
from penstock.engine.spans import role_dtype
from penstock.engine.tensor_access import Access, Source
from penstock.errors import UnsupportedModelError
from penstock.model.inventory import Inventory, TensorSpec
from penstock.optim.formats import num_blocks
from penstock.roles import STATE, Role

OPTIMIZER = "optimizer"
"""The stem of its files."""

READERS = 8
"""Threads that read a file: some wait for the disk while others copy from their buffers."""

_own = threading.local()

_SUFFIX = {Role.MASTER: "rest", Role.FIRST: "first", Role.SECOND: "second"}


class EngineFiles:
    """What an engine keeps, as files."""

    def __init__(self, access: Access, inventory: Inventory) -> None:
        self._access, self._inventory = access, inventory

    def writers(self, *, optimizer: bool = True) -> list[ShardWriter]:
        """For the model, and for the optimizer's states; they know their sizes beforehand."""
        made = [ShardWriter(list(self._weights()))]
        if optimizer:
            made.append(ShardWriter(list(self._states()), stem=OPTIMIZER, private=True))
        return made

    def write(
        self, folder: Path, *, optimizer: bool = True, progress: Progress | None = None
    ) -> None:
        for writer in self.writers(optimizer=optimizer):
            writer.write(folder, progress)

    def read(self, folder: Path) -> None:
        """All of it, as it was written: the same bits."""
        with (
            ShardReader(folder) as model,
            ShardReader(folder, OPTIMIZER) as states,
            BoundedExecutor(READERS) as crew,
        ):
            for index, block in enumerate(self._inventory.blocks):
                self._access.fill(index, Role.WEIGHT, _reader(model, ""), crew=crew)
                if not block.parameters(True):
                    continue
                for role in STATE:
                    bases = _base_reader(states, role) if self._has_bases(role) else None
                    source = _reader(states, _SUFFIX[role])
                    self._access.fill(index, role, source, bases=bases, crew=crew)

    def read_weights(self, folder: Path) -> None:
        """A model that anybody wrote: its weights become masters, moments begin at zero."""
        with ShardReader(folder) as model, BoundedExecutor(READERS) as crew:
            names = names_in(model, self._inventory)
            for index in range(len(self._inventory.blocks)):
                set_master(
                    self._access, index, self._inventory, _renamed(model, names),
                    lambda tensor: model.spec(names[tensor.name]).dtype, crew=crew,
                )  # fmt: skip

    # What is written.

    def _weights(self) -> Iterator[TensorOut]:
        for block in self._inventory.blocks:
            for tensor in block.tensors:
                yield self._out(tensor, Role.WEIGHT, tensor.name, tensor.shape)

    def _states(self) -> Iterator[TensorOut]:
        trained = (t for block in self._inventory.blocks for t in block.tensors if t.trainable)
        for tensor in trained:
            for role in STATE:
                name = f"{tensor.name}.{_SUFFIX[role]}"
                yield self._out(tensor, role, name, tensor.shape)
                if self._has_bases(role):
                    count = (num_blocks(tensor.elements),)
                    yield self._out(tensor, role, f"{name}_base", count, bases=True)

    def _out(
        self, tensor: TensorSpec, role: Role, name: str, shape: tuple[int, ...],
        bases: bool = False,
    ) -> TensorOut:  # fmt: skip
        dtype = torch.int16 if bases else role_dtype(role, self._access.formats)
        parts = partial(self._access.parts, tensor.name, role, bases=bases)
        return TensorOut(name=name, dtype=dtype, shape=shape, parts=parts)

    def _has_bases(self, role: Role) -> bool:
        return self._access.has_bases and role in (Role.FIRST, Role.SECOND)


# Where elements come from.


def _reader(shards: ShardReader, suffix: str) -> Source:
    def read(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        name = f"{tensor.name}.{suffix}" if suffix else tensor.name
        return elements_of(shards, name, tensor, low, high)

    return read


def _base_reader(shards: ShardReader, role: Role) -> Source:
    def read(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        name = f"{tensor.name}.{_SUFFIX[role]}_base"
        out = _landing(num_blocks(high - low), torch.int16)
        shards.read_into(name, out, num_blocks(low))
        return out

    return read


def _renamed(shards: ShardReader, names: dict[str, str]) -> Source:
    def read(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        return elements_of(shards, names[tensor.name], tensor, low, high)

    return read


def elements_of(
    shards: ShardReader, name: str, tensor: TensorSpec, low: int, high: int
) -> torch.Tensor:
    """Good until this thread asks for others."""
    spec = shards.spec(name)
    if spec.shape != tensor.shape:
        raise UnsupportedModelError(
            f"{shards.path}: {name} has shape {spec.shape}, but the model's config asks for "
            f"{tensor.shape}; weights and config.json are not of one model"
        )
    out = _landing(high - low, spec.dtype)
    shards.read_into(name, out, low)
    return out


def _landing(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of this thread's own, good until it asks again: a page of new memory takes about as
    long as filling it from a good disk."""
    nbytes = count * dtype.itemsize
    held: torch.Tensor | None = getattr(_own, "landing", None)
    if held is None or held.numel() < nbytes:
        held = _own.landing = torch.empty(nbytes, dtype=torch.uint8)
    return held[:nbytes].view(dtype)


def names_in(shards: ShardReader, inventory: Inventory) -> dict[str, str]:
    """What the files call each tensor: some were written from the model without its head, and then
    lack the first part of every name."""
    known = set(shards.names)
    prefix = inventory.layers[0].name.split(".")[0] + "."
    found = {}
    for block in inventory.blocks:
        for tensor in block.tensors:
            bare = tensor.name.removeprefix(prefix)
            candidates = (tensor.name, bare, prefix + tensor.name)
            found[tensor.name] = next((n for n in candidates if n in known), tensor.name)
    return found
