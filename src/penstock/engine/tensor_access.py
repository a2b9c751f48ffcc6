"""Read and write what lives in tiers, tensor by tensor, in bounded memory.

Loading, saving and inspecting parameters go through here, between steps only: data on NVMe passes
through the staging memory that steps use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from penstock.engine.allocate import EngineMemory
from penstock.engine.bounded_executor import BoundedExecutor
from penstock.engine.spans import Span, role_dtype
from penstock.model.inventory import TensorSpec
from penstock.roles import Formats, Role

PART = 1 << 22
"""Number of elements transferred at a time: a multiple of what the sweep cuts at."""

Source = Callable[[TensorSpec, int, int], torch.Tensor]
"""Returns elements `low` to `high` of a tensor, in the role's own type, on the host.

The result is valid until the same thread calls it again.
"""

TensorPart = tuple[TensorSpec, int, int, int]
"""A tensor, its first element and end, and the tensor's offset in its block."""


class TensorAccess:
    """Access to every role of every tensor by name."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory, self._tiers = memory, memory.tiers
        blocks = memory.tiers.inventory.blocks
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

    def parts(self, name: str, role: Role, *, bases: bool = False) -> Iterator[torch.Tensor]:
        """Yield a role of a tensor on the host, part by part; each is valid until the next."""
        block, tensor = self._owner[name]
        offset = self._offset(block, tensor)
        end = offset + tensor.elements
        landing: torch.Tensor | None = None
        for span in self._spans(block, role, offset, end):
            low, stop = max(span.first, offset), min(span.first + span.count, end)
            while low < stop:
                high = min(low + PART, stop)
                values = span.bases(low, high) if bases else span.values(low, high)
                assert values is not None
                if values.is_cuda and landing is None:
                    # Pinned, and reused for all parts: copies into a new tensor for each part are
                    # no faster than a good disk, and a checkpoint's writer would wait for them.
                    size = min(PART, tensor.elements)
                    landing = torch.empty(size, dtype=values.dtype, pin_memory=True)
                yield values if landing is None else landing[: len(values)].copy_(values)
                low = high

    def fill(
        self, block: int, role: Role, source: Source, *, bases: Source | None = None,
        executor: BoundedExecutor | None = None,
    ) -> None:  # fmt: skip
        """Write every element of a block's role from `source`, and the bases of 8-bit moments.

        With an executor, its threads call `source`, and the block is complete only after
        `executor.wait_all`.
        """
        end = self._tiers.inventory.blocks[block].flat_elements(True)
        if role is Role.WEIGHT:
            end += self._tiers.inventory.blocks[block].flat_elements(False)
        for span in self._spans(block, role, 0, end, write=True):
            for part in self._parts_of(span, block, role):
                call = partial(_fill_part, span, part, source, bases)
                call() if executor is None else executor.submit(call)
            if executor is not None and self._tiers.on_disk(block, role):
                executor.wait_all()  # the span is in staging; the next iteration writes it to disk

    def clear(self, block: int, role: Role) -> None:
        """Set a role to zero. In every format, 8-bit moments included, that means zero bytes."""
        end = self._tiers.inventory.blocks[block].flat_elements(True)
        for span in self._spans(block, role, 0, end, write=True):
            span.data.zero_()

    def _parts_of(self, span: Span, block: int, role: Role) -> Iterator[TensorPart]:
        """Yield the parts of tensors that lie in a span."""
        for tensor in self._tiers.inventory.blocks[block].tensors:
            if role is not Role.WEIGHT and not tensor.trainable:
                continue
            offset = self._offset(block, tensor)
            low = max(span.first, offset)
            stop = min(span.first + span.count, offset + tensor.elements)
            for first in range(low, stop, PART):
                yield tensor, first - offset, min(first + PART, stop) - offset, offset

    def _offset(self, block: int, tensor: TensorSpec) -> int:
        """Return a tensor's first element in its block: frozen tensors follow the trainable."""
        spec = self._tiers.inventory.blocks[block]
        shift = 0 if tensor.trainable else spec.flat_elements(True)
        return shift + spec.offsets(tensor.trainable)[tensor.name]

    def _spans(
        self, block: int, role: Role, start: int, stop: int, *, write: bool = False
    ) -> Iterator[Span]:
        """Yield the spans that hold elements `start` to `stop`; NVMe is read through staging."""
        if not self._tiers.has(block, role):
            return  # a head that is tied, after a norm without weights, has no tensor of its own
        if not self._tiers.on_disk(block, role):
            yield self._tiers.span(block, role)
            return
        trained = self._tiers.inventory.blocks[block].flat_elements(True)
        for piece in self._tiers.pieces(block, role):
            low, high, trainable = self._tiers.piece_span(block, piece)
            shift = 0 if trainable else trained
            if low + shift < stop and start < high + shift:
                yield from self._staged_span(block, role, piece, low + shift, high - low, write)

    def _staged_span(
        self, block: int, role: Role, piece: int, first: int, count: int, write: bool
    ) -> Iterator[Span]:
        """Yield one piece in staging: read it before, or write it back after the caller's turn."""
        store, extent = self._memory.store, self._tiers.extent(block, role, piece)
        data = self._memory.staging[: extent.stored_nbytes]
        if not write:
            store.start_read(extent, data.numpy()).wait()
        yield Span(role, data, first, count, self._tiers.formats)
        if write:
            store.start_write(extent, data.numpy()).wait()


def _fill_part(span: Span, part: TensorPart, source: Source, bases: Source | None) -> None:
    tensor, low, high, offset = part
    span.values(offset + low, offset + high).copy_(source(tensor, low, high))
    if bases is not None:
        into = span.bases(offset + low, offset + high)
        assert into is not None
        into.copy_(bases(tensor, low, high))
