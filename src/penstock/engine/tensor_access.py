"""Reading and writing what rests, tensor by tensor, in bounded memory. Room: move.

For loading, saving and looking at parameters; between steps only.
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
"""Elements handed over at a time: a multiple of what the sweep cuts at."""

Source = Callable[[TensorSpec, int, int], torch.Tensor]
"""Elements `low` to `high` of a tensor, in the role's own type, on the host: good until the same
thread asks again."""


Part = tuple[TensorSpec, int, int, int]
"""Elements of a tensor, from one to before another, and where the tensor begins in its block."""


def _fill_part(span: Span, part: Part, source: Source, bases: Source | None) -> None:
    tensor, low, high, at = part
    span.values(at + low, at + high).copy_(source(tensor, low, high))
    if bases is not None:
        into = span.bases(at + low, at + high)
        assert into is not None
        into.copy_(bases(tensor, low, high))


class Access:
    """What each role of each tensor holds."""

    def __init__(self, taken: EngineMemory) -> None:
        self._taken, self._homes = taken, taken.homes
        blocks = taken.homes.inventory.blocks
        self._owner = {t.name: (i, t) for i, b in enumerate(blocks) for t in b.tensors}

    @property
    def formats(self) -> Formats:
        return self._homes.formats

    @property
    def weight_dtype(self) -> torch.dtype:
        return role_dtype(Role.WEIGHT, self._homes.formats)

    @property
    def has_bases(self) -> bool:
        return self._homes.formats.moments == "int8"

    def tensor(self, name: str) -> tuple[int, TensorSpec]:
        """Its block and its shape."""
        return self._owner[name]

    def parts(self, name: str, role: Role, *, bases: bool = False) -> Iterator[torch.Tensor]:
        """Its elements on the host, a part at a time: each is good until the next."""
        block, tensor = self._owner[name]
        at = self._start(block, tensor)
        landing: torch.Tensor | None = None
        for span in self._spans(block, role, at, at + tensor.elements):
            low, stop = max(span.first, at), min(span.first + span.count, at + tensor.elements)
            while low < stop:
                high = min(low + PART, stop)
                values = span.bases(low, high) if bases else span.values(low, high)
                assert values is not None
                if values.is_cuda and landing is None:
                    # Pinned and used again: copies to a new tensor for each part are no faster than
                    # a good disk, which then waits for them.
                    size = min(PART, tensor.elements)
                    landing = torch.empty(size, dtype=values.dtype, pin_memory=True)
                yield values if landing is None else landing[: len(values)].copy_(values)
                low = high

    def fill(
        self, block: int, role: Role, source: Source, *, bases: Source | None = None,
        crew: BoundedExecutor | None = None,
    ) -> None:  # fmt: skip
        """Every element of the block's role, from `source`; with 8-bit moments also the bases. A
        crew calls `source` from its threads, and is through when it has settled."""
        end = self._homes.inventory.blocks[block].flat_elements(True)
        if role is Role.WEIGHT:
            end += self._homes.inventory.blocks[block].flat_elements(False)
        for span in self._spans(block, role, 0, end, write=True):
            for part in self._parts_of(span, block, role):
                call = partial(_fill_part, span, part, source, bases)
                call() if crew is None else crew.start(call)
            if crew is not None and self._homes.on_disk(block, role):
                crew.settle()  # the span is in staging, and goes to its disk now

    def clear(self, block: int, role: Role) -> None:
        """Zero in every format, 8-bit moments' bases included: zero bytes, at memory's speed."""
        end = self._homes.inventory.blocks[block].flat_elements(True)
        for span in self._spans(block, role, 0, end, write=True):
            span.data.zero_()

    def _parts_of(self, span: Span, block: int, role: Role) -> Iterator[Part]:
        for tensor in self._homes.inventory.blocks[block].tensors:
            if role is not Role.WEIGHT and not tensor.trainable:
                continue
            at = self._start(block, tensor)
            low = max(span.first, at)
            stop = min(span.first + span.count, at + tensor.elements)
            for first in range(low, stop, PART):
                yield tensor, first - at, min(first + PART, stop) - at, at

    def _start(self, block: int, tensor: TensorSpec) -> int:
        model = self._homes.inventory.blocks[block]
        shift = 0 if tensor.trainable else model.flat_elements(True)
        return shift + model.offsets(tensor.trainable)[tensor.name]

    def _spans(
        self, block: int, role: Role, start: int, stop: int, *, write: bool = False
    ) -> Iterator[Span]:
        """Where elements `start` to `stop` are; what is on disk comes through staging."""
        if not self._homes.on_disk(block, role):
            yield self._homes.span(block, role)
            return
        trained = self._homes.inventory.blocks[block].flat_elements(True)
        for piece in self._homes.pieces(block, role):
            low, high, trainable = self._homes.piece_span(block, piece)
            shift = 0 if trainable else trained
            if low + shift < stop and start < high + shift:
                yield from self._staged(block, role, piece, low + shift, high - low, write)

    def _staged(
        self, block: int, role: Role, piece: int, first: int, count: int, write: bool
    ) -> Iterator[Span]:
        store, extent = self._taken.store, self._homes.extent(block, role, piece)
        data = self._taken.staging[: extent.stored_nbytes]
        if not write:
            store.start_read(extent, data.numpy()).wait()
        yield Span(role, data, first, count, self._homes.formats)
        if write:
            store.start_write(extent, data.numpy()).wait()
