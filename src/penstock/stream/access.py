"""Reading and writing what rests, tensor by tensor, in bounded memory. Room: move.

For loading, saving and looking at parameters; between steps only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from penstock.inventory import TensorSpec
from penstock.roles import Formats, Role
from penstock.stream.spans import Span, role_dtype
from penstock.stream.state import Taken

T = TypeVar("T")

PART = 1 << 22
"""Elements handed over at a time: a multiple of what the sweep cuts at."""

Source = Callable[[TensorSpec, int, int], torch.Tensor]
"""Elements `low` to `high` of a tensor, in the role's own type, on the host."""


def ahead(calls: Sequence[Callable[[], T]], threads: int) -> Iterator[T]:
    """What each call gives, in order; with several threads, one call a thread is under way."""
    if threads == 1:
        yield from (call() for call in calls)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock load") as pool:
        coming: deque[Future[T]] = deque()
        try:
            for call in calls:
                coming.append(pool.submit(call))
                if len(coming) > threads:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()


class Access:
    """What each role of each tensor holds."""

    def __init__(self, taken: Taken) -> None:
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
        for span in self._spans(block, role, at, at + tensor.elements):
            low, stop = max(span.first, at), min(span.first + span.count, at + tensor.elements)
            while low < stop:
                high = min(low + PART, stop)
                values = span.bases(low, high) if bases else span.values(low, high)
                assert values is not None
                yield values.cpu()
                low = high

    def fill(
        self, block: int, role: Role, source: Source, *, bases: Source | None = None,
        threads: int = 1,
    ) -> None:  # fmt: skip
        """Every element of the block's role, from `source`; with 8-bit moments also the bases. With
        several threads they call `source` for what comes next, a few parts ahead."""
        end = self._homes.inventory.blocks[block].flat_elements(True)
        if role is Role.WEIGHT:
            end += self._homes.inventory.blocks[block].flat_elements(False)
        for span in self._spans(block, role, 0, end, write=True):
            parts = list(self._parts_of(span, block, role))
            came = ahead([partial(source, *part[:3]) for part in parts], threads)
            for (tensor, low, high, at), values in zip(parts, came, strict=True):
                span.values(at + low, at + high).copy_(values)
                if bases is not None:
                    into = span.bases(at + low, at + high)
                    assert into is not None
                    into.copy_(bases(tensor, low, high))

    def clear(self, block: int, role: Role) -> None:
        """Zero in every format, 8-bit moments' bases included: zero bytes, at memory's speed."""
        end = self._homes.inventory.blocks[block].flat_elements(True)
        for span in self._spans(block, role, 0, end, write=True):
            span.data.zero_()

    def _parts_of(
        self, span: Span, block: int, role: Role
    ) -> Iterator[tuple[TensorSpec, int, int, int]]:
        """What of each tensor lies in the span, in parts; and where the tensor begins."""
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
