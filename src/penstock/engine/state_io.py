"""Write weights and optimizer states to safetensors files, and read them.

The files do not depend on the plan: every tensor is whole and under its own name, so a checkpoint
that was written under one plan can be read under another.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from penstock.checkpoint.adapter_files import STEM as ADAPTER
from penstock.checkpoint.adapter_files import (
    AdapterFiles,
    BaseModel,
    WeightDigest,
    check_described,
)
from penstock.checkpoint.assemble import Assembler
from penstock.checkpoint.errors import TensorMismatchError
from penstock.checkpoint.manifest import FileRecord
from penstock.checkpoint.model_weights import ModelWeights
from penstock.checkpoint.plain_tensors import thread_buffer
from penstock.checkpoint.reader import ShardReader
from penstock.checkpoint.shard_template import ShardTemplate
from penstock.checkpoint.writer import Progress, ShardWriter, TensorOut
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.initial_weights import set_master
from penstock.engine.rank_agreement import all_or_none, share_bytes
from penstock.engine.spans import role_dtype
from penstock.engine.tensor_access import PART, Source, TensorAccess
from penstock.engine.transport import Transport
from penstock.model.adapters import Adapter, base_name
from penstock.model.inventory import Inventory, TensorSpec
from penstock.model.saved_names import SavedNames
from penstock.model.tensor_layout import Layout
from penstock.optim.formats import num_blocks, read_master
from penstock.records import from_json, to_json
from penstock.roles import STATE, Role

OPTIMIZER = "optimizer"
"""Stem of the names of files with optimizer states."""

READERS = 8
"""Threads that read files: some wait for the disk while others copy from their buffers."""

_SUFFIX = {Role.MASTER: "rest", Role.FIRST: "first", Role.SECOND: "second"}


class EngineFiles:
    """The weights and optimizer states of an engine, as files."""

    def __init__(
        self, access: TensorAccess, inventory: Inventory, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._access, self._inventory, self._buffers = access, inventory, buffers
        self.adapter: AdapterFiles | None = None
        """The adapter that is trained: only its tensors are saved, and the others are those of the
        base model. None if the weights themselves are trained."""
        self.saved_names = SavedNames()
        """Names and forms in which the weights are saved. Reading sets those of the files."""
        self._template: ShardTemplate | None = None
        """The files that the weights were read from: the same tensors are saved in the same way."""
        self.others: Mapping[str, torch.Tensor] = {}
        """Tensors of a live multimodal model that the engine does not have, saved with it."""
        self._source: ModelWeights | None = None
        """The files of a multimodal model, whose other tensors are copied when it is saved."""

    def close(self) -> None:
        """Close the files of a multimodal model."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def writers(self, *, optimizer: bool = True) -> list[ShardWriter]:
        """Return a writer for the model and one for the optimizer states.

        They know the sizes of their files before they write, so that free space can be checked.
        """
        if self.adapter is None:
            writers = [ShardWriter(list(self._weights()), template=self._template)]
        else:
            # PEFT reads one file.
            tensors = list(self._adapter_tensors(self.adapter))
            writers = [ShardWriter(tensors, stem=ADAPTER, max_shard_nbytes=sys.maxsize)]
        if optimizer:
            writers.append(ShardWriter(list(self._states()), stem=OPTIMIZER, private=True))
        return writers

    def write(
        self, folder: Path, ranks: Transport, *, optimizer: bool = True,
        progress: Progress | None = None,
    ) -> dict[str, FileRecord]:  # fmt: skip
        """Write the weights and, with `optimizer`, the optimizer states: every rank some files.

        Returns the sizes and checksums of all files, for the manifest. If a rank cannot write,
        every rank raises an error.
        """
        written: dict[str, FileRecord] = {}
        writers = self.writers(optimizer=optimizer)
        for writer in writers:
            with all_or_none(ranks):
                written |= writer.write(folder, progress, rank=ranks.rank, world=ranks.world)
        found = _gather_records(ranks, written)
        # The order in the manifest must not depend on who wrote what.
        return {name: found[name] for writer in writers for name in writer.names}

    def move_source(self, folder: Path) -> None:
        """Read the other tensors of a multimodal model from a folder that was just written.

        An open file that was deleted would keep its disk space.
        """
        if self._source is not None:
            self._source.move_to(folder)

    def read(self, folder: Path) -> None:
        """Read what `write` wrote, bit for bit."""
        if self.adapter is not None:
            self._read_adapter(folder, self.adapter)
            return
        with (
            self._open(folder) as model,
            ShardReader(folder, OPTIMIZER) as states,
            BoundedExecutor(READERS) as executor,
        ):
            for index in range(len(self._inventory.blocks)):
                self._access.fill(index, Role.WEIGHT, model.read, executor=executor)
                self._read_states(index, states, executor)

    def _read_adapter(self, folder: Path, adapter: AdapterFiles) -> None:
        """Read an adapter and its states. The frozen weights stay as they are."""
        with (
            ShardReader(folder, ADAPTER) as tensors,
            ShardReader(folder, OPTIMIZER) as states,
            BoundedExecutor(READERS) as executor,
        ):
            # First: with another adapter, other weights are frozen, and their digest differs.
            described = {tensor.name for tensor in self._adapter_tensors(adapter)}
            check_described(tensors, adapter.adapter, described, config="the adapter of this run")
            BaseModel.load(folder).check(folder, adapter.base)
            read = _adapter_reader(tensors, adapter)
            for index in range(len(self._inventory.blocks)):
                # The file has master weights. Their other part is in the file of the states.
                set_master(
                    self._access, index, self._inventory, read, lambda _: torch.float32,
                    executor=executor, trainable=True,
                )  # fmt: skip
                executor.wait_all()
                self._read_states(index, states, executor)
            read_buffers(tensors, adapter, self._buffers)

    def _read_states(self, index: int, states: ShardReader, executor: BoundedExecutor) -> None:
        if not self._inventory.blocks[index].parameters(True):
            return
        for role in self._state_roles():
            bases = _base_reader(states, role) if self._has_bases(role) else None
            source = _reader(states, _SUFFIX[role], partial(self._access.state_shape, role=role))
            self._access.fill(index, role, source, bases=bases, executor=executor)

    def read_base(
        self, folder: Path, drawn: Mapping[str, torch.Tensor] | None, dtype: torch.dtype
    ) -> str:
        """Read the weights of the base model of an adapter; return their digest.

        `drawn` are the tensors of the adapter. Without it, only frozen weights are set.
        """
        assert self.adapter is not None
        adapter, digest = self.adapter.adapter, WeightDigest()
        base = base_inventory(self._inventory, adapter)
        with ModelWeights(folder, base, dtype) as model, BoundedExecutor(READERS) as executor:
            source = _BaseSource(model, drawn or {})
            model.read_buffers(self._buffers)
            for index in range(len(self._inventory.blocks)):
                set_master(
                    self._access, index, self._inventory, source.read, source.dtype,
                    executor=executor, digest=digest, trainable=None if drawn else False,
                )  # fmt: skip
        return digest.value

    def read_weights(self, folder: Path) -> None:
        """Read any model's weights: they become the master weights, and moments start at zero."""
        with (
            self._open(folder) as model,
            BoundedExecutor(READERS) as executor,
        ):
            for index in range(len(self._inventory.blocks)):
                set_master(
                    self._access, index, self._inventory, model.read, model.dtype,
                    executor=executor,
                )  # fmt: skip

    @contextlib.contextmanager
    def _open(self, folder: Path) -> Iterator[ModelWeights]:
        """Open the files of a model, and close them unless saving needs them again."""
        self.close()
        with contextlib.ExitStack() as opened:
            weights = ModelWeights(folder, self._inventory, self._access.weight_dtype)
            opened.enter_context(weights)
            weights.read_buffers(self._buffers)
            yield weights
            self.saved_names, self._template = weights.saved_names, weights.shards.template()
            for name in weights.kept if self.others else ():
                values = torch.cat([part.clone() for part in weights.kept_parts(name)])
                self.others[name].copy_(values.view(self.others[name].shape))
            if weights.kept and not self.others:
                weights.shards.check_partly_read()
                opened.pop_all()
                self._source = weights

    def _weights(self) -> Iterator[TensorOut]:
        source, names = self._source, self.saved_names.names
        splits = self.saved_names.splits_by_tensor()
        for block in self._inventory.blocks:
            for tensor in block.tensors:
                if tensor.name in splits:
                    yield from map(self._split_out, splits[tensor.name])
                    continue
                yield self._out(
                    tensor, Role.WEIGHT, names.get(tensor.name, tensor.name), tensor.shape
                )
        for name, buffer in self._buffers.items():
            yield TensorOut(
                name=names.get(name, name), dtype=buffer.dtype, shape=tuple(buffer.shape),
                parts=partial(_whole, buffer),
            )  # fmt: skip
        for name, other in self.others.items():
            yield TensorOut(
                name=name, dtype=other.dtype, shape=tuple(other.shape), parts=partial(_whole, other)
            )
        for name in () if source is None else source.kept:
            assert source is not None
            spec, parts = source.kept_spec(name), partial(source.kept_parts, name)
            yield TensorOut(name=name, dtype=spec.dtype, shape=spec.shape, parts=parts)

    def _split_out(self, name: str) -> TensorOut:
        """Return a tensor that files have in another form than the model, such as one expert's."""
        layout = self.saved_names.splits[name]
        return TensorOut(
            name=name, dtype=self._access.weight_dtype, shape=layout.shape,
            parts=partial(self._split_parts, layout),
        )  # fmt: skip

    def _split_parts(self, layout: Layout) -> Iterator[torch.Tensor]:
        """Yield a tensor that a layout describes, part by part."""
        pieces = list(layout.pieces(0, layout.elements))
        if all(piece.is_run for piece in pieces):
            for piece in pieces:
                low, high = piece.first, piece.first + piece.elements
                yield from self._access.parts(piece.source, Role.WEIGHT, low=low, high=high)
            return
        assembler = Assembler(self._fill_weights)
        for low in range(0, layout.elements, PART):
            out = torch.empty(min(PART, layout.elements - low), dtype=self._access.weight_dtype)
            assembler.read(layout, low, out)
            yield out

    def _fill_weights(self, name: str, first: int, out: torch.Tensor) -> None:
        """Fill a tensor with weights from element `first` on."""
        at = 0
        high = first + out.numel()
        for part in self._access.parts(name, Role.WEIGHT, low=first, high=high):
            out[at : at + part.numel()].copy_(part)
            at += part.numel()

    def _adapter_tensors(self, adapter: AdapterFiles) -> Iterator[TensorOut]:
        """Yield the tensors of PEFT's file; those that are trained, as fp32 master weights."""
        tensors = {t.name: t for block in self._inventory.blocks for t in block.tensors}
        named = [(own, name) for own, name in adapter.names.items() if own in tensors]
        for own, name in [*named, *((own, name) for name, own in adapter.tied.items())]:
            tensor = tensors[own]
            if not tensor.trainable:
                yield self._out(tensor, Role.WEIGHT, name, tensor.shape)
                continue
            yield TensorOut(
                name=name, dtype=torch.float32, shape=tensor.shape,
                parts=partial(self._master_parts, tensor.name),
            )  # fmt: skip
        for own, buffer in self._buffers.items():
            if own in adapter.names:
                yield TensorOut(
                    name=adapter.names[own], dtype=buffer.dtype, shape=tuple(buffer.shape),
                    parts=partial(_whole, buffer),
                )  # fmt: skip

    def _master_parts(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the fp32 master weights of a tensor part by part."""
        if not self._access.formats.has(Role.MASTER):
            yield from self._access.parts(name, Role.WEIGHT)
            return
        # Two roles cannot be read in turn: both may pass through the same staging memory.
        weight = torch.cat([p.clone() for p in self._access.parts(name, Role.WEIGHT)])
        start = 0
        for rest in self._access.parts(name, Role.MASTER):
            yield read_master(weight[start : start + rest.numel()], rest)
            start += rest.numel()

    def _states(self) -> Iterator[TensorOut]:
        trained = (t for block in self._inventory.blocks for t in block.tensors if t.trainable)
        for tensor in trained:
            for role in self._state_roles():
                name = f"{tensor.name}.{_SUFFIX[role]}"
                shape = self._access.state_shape(tensor.name, role)
                if shape == (0,):  # Muon has no second moments of matrices
                    continue
                yield self._out(tensor, role, name, shape)
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

    def _state_roles(self) -> list[Role]:
        return [role for role in STATE if self._access.formats.has(role)]

    def _has_bases(self, role: Role) -> bool:
        return self._access.has_bases and role in (Role.FIRST, Role.SECOND)


def _gather_records(ranks: Transport, own: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """Return what all ranks have written."""
    if ranks.world == 1:
        return own
    found: dict[str, FileRecord] = {}
    sent = json.dumps({name: to_json(record) for name, record in own.items()}).encode()
    for rank in range(ranks.world):
        records = json.loads(share_bytes(ranks, sent, rank))
        found |= {name: from_json(FileRecord, record) for name, record in records.items()}
    return found


def _whole(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor.detach().cpu().reshape(-1)


def base_inventory(inventory: Inventory, adapter: Adapter) -> Inventory:
    """Return the inventory of the model without the adapter, as far as its weights are needed."""
    seen: set[str] = set()
    blocks = []
    for block in inventory.blocks:
        tensors = {
            base_name(t.name): replace(t, name=base_name(t.name))
            for t in block.tensors
            if not adapter.is_own(t.name) and base_name(t.name) not in seen
        }
        seen |= tensors.keys()
        blocks.append(replace(block, tensors=tuple(tensors.values()), borrows=()))
    return replace(inventory, blocks=tuple(blocks))


# Sources that read from files.


class _BaseSource:
    """The weights of a base model, and the tensors of a new adapter."""

    def __init__(self, model: ModelWeights, drawn: Mapping[str, torch.Tensor]) -> None:
        self._model, self._drawn = model, drawn

    def read(self, tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        if tensor.name in self._drawn:
            return self._drawn[tensor.name].reshape(-1)[low:high]
        return self._model.read(self._in_base(tensor), low, high)

    def dtype(self, tensor: TensorSpec) -> torch.dtype:
        if tensor.name in self._drawn:
            return self._drawn[tensor.name].dtype
        return self._model.dtype(self._in_base(tensor))

    @staticmethod
    def _in_base(tensor: TensorSpec) -> TensorSpec:
        return replace(tensor, name=base_name(tensor.name))


def _adapter_reader(shards: ShardReader, adapter: AdapterFiles) -> Source:
    def read(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        name = adapter.names[tensor.name]
        _check_shape(shards, name, tensor.shape)
        out = thread_buffer(high - low, shards.spec(name).dtype)
        shards.read_into(name, out, low)
        return out

    return read


def read_buffers(
    shards: ShardReader, adapter: AdapterFiles, buffers: Mapping[str, torch.Tensor]
) -> None:
    """Set the buffers of an adapter."""
    for own, buffer in buffers.items():
        if own in adapter.names:
            name = adapter.names[own]
            out = torch.empty(buffer.numel(), dtype=shards.spec(name).dtype)
            shards.read_into(name, out, 0)
            buffer.copy_(out.view(buffer.shape))


def _check_shape(shards: ShardReader, name: str, shape: tuple[int, ...]) -> None:
    spec = shards.spec(name)
    if spec.shape != shape:
        wanted, had = f"shape {shape}", f"shape {spec.shape}"
        raise TensorMismatchError(shards.file_of(name), name, wanted=wanted, had=had)


def _reader(shards: ShardReader, suffix: str, shape_of: Callable[[str], tuple[int, ...]]) -> Source:
    def read(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        name = f"{tensor.name}.{suffix}"
        _check_shape(shards, name, shape_of(tensor.name))
        out = thread_buffer(high - low, shards.spec(name).dtype)
        shards.read_into(name, out, low)
        return out

    return read


def _base_reader(shards: ShardReader, role: Role) -> Source:
    def read(tensor: TensorSpec, low: int, high: int) -> torch.Tensor:
        name = f"{tensor.name}.{_SUFFIX[role]}_base"
        out = thread_buffer(num_blocks(high - low), torch.int16)
        shards.read_into(name, out, num_blocks(low))
        return out

    return read
