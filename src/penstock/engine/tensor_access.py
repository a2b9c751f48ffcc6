"""Read and write what lives in tiers, tensor by tensor, in bounded memory.

Loading, saving and inspecting parameters go through here, between steps only: data on NVMe passes
through the staging memory that steps use.

Every rank writes only what it stores, and reads whole tensors: `TensorAccess.parts` is a collective
call, in which the rank that stores a part sends it to all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import NamedTuple

import torch

from penstock.engine.allocate import EngineMemory
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.device import Device
from penstock.engine.spans import Span, role_dtype
from penstock.engine.startup import STATES
from penstock.errors import EngineError
from penstock.model.inventory import TensorSpec
from penstock.model.quantize import dequantized_parts, quantize
from penstock.optim.formats import num_blocks
from penstock.packed_weights import PackedLayout
from penstock.roles import Formats, Role
from penstock.units import round_up

PART = 1 << 22
"""Number of elements transferred at a time: a multiple of what the sweep cuts at."""

Source = Callable[[TensorSpec, int, int], torch.Tensor]
"""Returns elements `low` to `high` of a tensor, in the role's own type, on the host.

The result is valid until the same thread calls it again.
"""

TensorPart = tuple[TensorSpec, int, int, int]
"""A tensor, its first element and end, and the tensor's offset in its block."""


class _StoredRange(NamedTuple):
    """Elements of a block's flat buffers that one rank stores together."""

    owner: int | None
    """The rank that stores them; None if every rank does."""
    first: int
    """Index of the first element."""
    elements: int
    """Number of elements."""
    piece: int | None
    """The piece of that rank's shard, if the role is on NVMe."""


class TensorAccess:
    """Access to every role of every tensor by name."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory, self._tiers, self._ranks = memory, memory.tiers, memory.ranks
        blocks = memory.tiers.inventory.blocks
        self._is_new = False  # whether the tiers hold nothing yet
        self._owner = {t.name: (i, t) for i, b in enumerate(blocks) for t in b.tensors}

    @property
    def formats(self) -> Formats:
        return self._tiers.formats

    @property
    def weight_dtype(self) -> torch.dtype:
        return role_dtype(Role.WEIGHT, self._tiers.formats)

    @property
    def has_bases(self) -> bool:
        return self._tiers.formats.moments == "int8"

    def tensor(self, name: str) -> tuple[int, TensorSpec]:
        """Return the index of a tensor's block, and its shape."""
        return self._owner[name]

    def parts(
        self, name: str, role: Role, *, bases: bool = False, low: int = 0, high: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield a role of a tensor on the host, part by part; each is valid until the next.

        `low` and `high` select elements of the flattened tensor, unless it is quantized; not for
        bases. Quantized weights are dequantized. All ranks must make this call, and request all
        parts.
        """
        tensor = self._owner[name][1]
        stored = self._stored_parts(name, role, low, high, bases=bases)
        if tensor.quantization is None:
            yield from stored
            return
        assert (low, high) == (0, None), f"{name} is quantized, and is read as a whole"
        packed = torch.cat([part.clone() for part in stored]).view(torch.uint8)
        yield from dequantized_parts(
            packed, tensor.elements, tensor.quantization, self.weight_dtype
        )

    def _stored_parts(
        self, name: str, role: Role, low: int, high: int | None, *, bases: bool
    ) -> Iterator[torch.Tensor]:
        block, tensor = self._owner[name]
        first_element, elements = self._place(block, role, tensor)
        offset = first_element + low
        end = first_element + (elements if high is None else high)
        landing: torch.Tensor | None = None
        on_gpu = self._tiers.device.pinned and self._tiers.on_device(block, role)
        if self._ranks.world > 1 or on_gpu:
            landing = self._landing(role, min(PART, end - offset), bases=bases)
        for stored in self._ranges(block, role):
            start, stop = max(stored.first, offset), min(stored.first + stored.elements, end)
            if start >= stop:
                continue
            own = stored.owner in (None, self._ranks.rank)
            wanted = None if bases else (start, stop)
            with self._opened(block, role, stored, wanted) if own else nullcontext() as span:
                for first in range(start, stop, PART):
                    last = min(first + PART, stop)
                    values = None
                    if span is not None:
                        values = span.bases(first, last) if bases else span.values(first, last)
                    yield self._on_host(values, landing, stored.owner, first, last, bases=bases)

    def fill(
        self, block: int, role: Role, source: Source, *, bases: Source | None = None,
        executor: BoundedExecutor | None = None, trainable: bool | None = None,
    ) -> None:  # fmt: skip
        """Write this rank's elements of a block's role from `source`, with bases of 8-bit moments.

        `trainable` selects trainable (True) or frozen (False) tensors; None writes both. With an
        executor, its threads call `source`, and the block is complete only after
        `executor.wait_all`. Weights that are stored quantized are quantized here.
        """
        writer = _PartWriter(source, bases, self._tiers.device)
        for stored in self._own_ranges(block, role):
            if stored.piece is not None and not self._has_any(block, stored.piece, trainable):
                continue
            with self._opened(block, role, stored, write=True) as span:
                for part in self._parts_of(span, block, role, trainable):
                    call = partial(writer.write, span, part)
                    call() if executor is None else executor.submit(call)
                if executor is not None and stored.piece is not None:
                    executor.wait_all()  # the span is in staging, and is written to disk next

    def clear(self, block: int, role: Role) -> None:
        """Set a role to zero. In every format, 8-bit moments included, that means zero bytes."""
        with self._memory.start_up.phase(STATES):
            for stored in self._own_ranges(block, role):
                if self._is_new and self._has_zeros(block, role, stored):
                    continue
                with self._opened(block, role, stored, write=True) as span:
                    span.data.zero_()

    @contextmanager
    def setting_initial_values(self) -> Iterator[None]:
        """Let `clear` leave memory alone that is zero because it is new.

        Inside the `with` block, every role may be set once, and nothing else may write to a tier.
        """
        self._is_new = True
        try:
            yield
        finally:
            self._is_new = False

    def _has_zeros(self, block: int, role: Role, stored: _StoredRange) -> bool:
        """Return whether new memory of this kind is zero: pages of the OS, and files are."""
        if stored.piece is None:
            return not self._tiers.on_device(block, role)  # torch reuses device memory
        extent = self._tiers.extent(block, role, stored.piece)
        return self._memory.store.assume_zeros(extent)

    def _has_any(self, block: int, piece: int, trainable: bool | None) -> bool:
        """Return whether a piece on NVMe has such tensors: a piece is trainable, or frozen."""
        return trainable in (None, self._tiers.piece_span(block, piece)[2])

    def _parts_of(
        self, span: Span, block: int, role: Role, trainable: bool | None
    ) -> Iterator[TensorPart]:
        """Yield the parts of tensors that lie in a span."""
        for tensor in self._tiers.inventory.blocks[block].tensors:
            if role is not Role.WEIGHT and not tensor.trainable:
                continue
            if trainable not in (None, tensor.trainable):
                continue
            offset, elements = self._place(block, role, tensor)
            low = max(span.first, offset)
            stop = min(span.first + span.count, offset + elements)
            step = PART if tensor.quantization is None else max(1, stop - low)
            for first in range(low, stop, step):
                yield tensor, first - offset, min(first + step, stop) - offset, offset

    def state_shape(self, name: str, role: Role) -> tuple[int, ...]:
        """Return the shape of a role of a tensor: one dimension, if it is not the tensor's own."""
        block, tensor = self._owner[name]
        elements = self._place(block, role, tensor)[1]
        return tensor.shape if elements == tensor.elements else (elements,)

    def _place(self, block: int, role: Role, tensor: TensorSpec) -> tuple[int, int]:
        """Return a tensor's first element in a role of its block, and its number of elements.

        Frozen tensors follow the trainable ones.
        """
        spec = self._tiers.inventory.blocks[block]
        if not tensor.trainable:
            offset = spec.flat_elements(True) + spec.offsets(False)[tensor.name]
            return offset, tensor.stored_elements
        return spec.state_offset(role, tensor), spec.state_elements(role, tensor)

    def _ranges(self, block: int, role: Role) -> Iterator[_StoredRange]:
        """Yield what the ranks store of a role, in the order of its elements."""
        if not self._tiers.has(block, role):
            return  # a head that is tied, after a norm without weights, has no tensor of its own
        rank, spec = self._ranks.rank, self._tiers.inventory.blocks[block]
        if role is Role.WEIGHT and self._tiers.is_split(block):
            yield from self._split_ranges(block)
            return
        if role is Role.WEIGHT and self._tiers.on_device(block, role):
            count = spec.flat_elements(True) + spec.flat_elements(False)
            yield _StoredRange(None, 0, count, None)
            return
        for trainable in (True, False) if role is Role.WEIGHT else (True,):
            count = spec.shard_elements(trainable)
            start = self._tiers.first_element(block, trainable) - rank * count
            for owner in range(self._ranks.world):
                first = start + owner * count
                if not self._tiers.on_disk(block, role):
                    yield _StoredRange(owner, first, spec.role_elements(role, 0, count), None)
                    continue
                for piece in self._tiers.pieces(block, role):
                    low, high, trained = self._tiers.piece_span(block, piece)
                    if trained == trainable:
                        low, high = spec.role_span(role, low, high)
                        yield _StoredRange(owner, first + low, high - low, piece)

    def _split_ranges(self, block: int) -> Iterator[_StoredRange]:
        """Yield the ranges of a block whose frozen weights are not on the device."""
        spec = self._tiers.inventory.blocks[block]
        first = spec.flat_elements(True)
        yield _StoredRange(None, 0, first, None)
        if not self._tiers.on_disk(block, Role.FROZEN):
            yield _StoredRange(None, first, spec.flat_elements(False), None)
            return
        for piece in self._tiers.pieces(block, Role.FROZEN):
            low, high, _ = self._tiers.piece_span(block, piece)
            yield _StoredRange(None, first + low, high - low, piece)

    def _own_ranges(self, block: int, role: Role) -> list[_StoredRange]:
        own = (None, self._ranks.rank)
        return [each for each in self._ranges(block, role) if each.owner in own and each.elements]

    @contextmanager
    def _opened(
        self, block: int, role: Role, stored: _StoredRange, wanted: tuple[int, int] | None = None,
        *, write: bool = False,
    ) -> Iterator[Span]:  # fmt: skip
        """Open a range that this rank stores; one on NVMe is read into staging, or written back.

        Of a range on NVMe, only the `wanted` elements are read, if they are given.
        """
        if stored.piece is None:
            spans = self._tiers.spans(block, role)
            yield next(s for s in spans if (s.first, s.count) == (stored.first, stored.elements))
            return
        store, extent = self._memory.store, self._tiers.extent(block, role, stored.piece)
        data = self._memory.staging[: extent.stored_nbytes]
        if not write:
            first, last = 0, extent.stored_nbytes
            if wanted is not None:
                # A piece has the slices of many experts, and a save reads them one by one.
                size = role_dtype(role, self._tiers.formats).itemsize
                first, end = ((element - stored.first) * size for element in wanted)
                first -= first % store.unit
                last = min(round_up(end, store.unit), last)
            store.start_read(extent, data[first:last].numpy(), offset=first).wait()
            if self._ranks.world > 1:
                # Ranks that write several files at the same time read tensors in turn.
                data = data.clone()
        yield Span(role, data, stored.first, stored.elements, self._tiers.formats)
        if write:
            store.start_write(extent, data.numpy()).wait()

    def _landing(self, role: Role, elements: int, *, bases: bool) -> torch.Tensor:
        """Return a host buffer for all parts of a tensor.

        Pinned, if there is a GPU, and reused: copies into a new tensor for each part are no faster
        than a good disk, and a checkpoint's writer would wait for them.
        """
        count = num_blocks(elements) if bases else elements
        dtype = torch.int16 if bases else role_dtype(role, self._tiers.formats)
        return torch.empty(count, dtype=dtype, pin_memory=self._tiers.device.pinned)

    def _on_host(
        self, values: torch.Tensor | None, landing: torch.Tensor | None, owner: int | None,
        first: int, last: int, *, bases: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return a part in host memory; `values` is None on ranks that do not store it."""
        if landing is None:
            assert values is not None
            return values
        part = landing[: num_blocks(last - first) if bases else last - first]
        if values is not None:
            part.copy_(values)
        if owner is not None:
            self._ranks.broadcast(part, owner)
        return part


class _PartWriter:
    """Writes parts of tensors from a source into memory. Several threads may use it."""

    def __init__(self, source: Source, bases: Source | None, device: Device) -> None:
        self._source, self._bases, self._device = source, bases, device
        self._lock = Lock()
        self._packed: tuple[str, torch.Tensor] | None = None  # the last tensor that was cut

    def write(self, span: Span, part: TensorPart) -> None:
        tensor, low, high, offset = part
        into = span.values(offset + low, offset + high)
        if tensor.quantization is not None:
            self._write_quantized(tensor, low, high, into)
            return
        into.copy_(self._source(tensor, low, high))
        if self._bases is not None:
            bases = span.bases(offset + low, offset + high)
            assert bases is not None
            bases.copy_(self._bases(tensor, low, high))

    def _write_quantized(self, tensor: TensorSpec, low: int, high: int, into: torch.Tensor) -> None:
        """Write stored elements `low` to `high` of a quantized tensor."""
        if high - low == tensor.stored_elements:
            self._quantize(tensor, into.view(torch.uint8))
            return
        # A tensor that is cut, between ranks or into pieces on NVMe, is quantized as a whole: its
        # scales have a common mean. The next piece, which comes next, needs the rest.
        with self._lock:
            if self._packed is None or self._packed[0] != tensor.name:
                self._packed = None  # before memory for the next one is allocated
                packed = torch.empty(PackedLayout(tensor.elements).nbytes, dtype=torch.uint8)
                self._quantize(tensor, packed)
                self._packed = tensor.name, packed
            into.copy_(self._packed[1].view(into.dtype)[low:high])

    def _quantize(self, tensor: TensorSpec, packed: torch.Tensor) -> None:
        assert tensor.quantization is not None

        def read(low: int, high: int) -> torch.Tensor:
            return self._source(tensor, low, high).to(self._device.torch_device)

        try:
            quantize(read, tensor.elements, tensor.quantization, packed)
        except EngineError as problem:
            raise EngineError(f"{tensor.name} {problem}") from None
