"""Read ranges of tensors that are put together from parts of others, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import torch

from penstock.model.tensor_layout import Layout, Piece

Fill = Callable[[str, int, torch.Tensor], None]
"""Fills a contiguous CPU tensor with elements of a source, from an index of the flattened source
on, and in the type of the tensor."""

SLABS = 4
"""Number of slabs that are kept: several threads read parts of the same or of the next one."""


class Assembler:
    """Reads tensors that layouts describe.

    Elements that are contiguous in a source go straight to their place. Others, such as those of a
    transposed matrix, come from a slab: the part of the source in which they are scattered, one
    expert's matrix for example. The last slabs are kept, because the next range needs the same one.
    Several threads may read.
    """

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._slabs: OrderedDict[tuple[str, int], Future[torch.Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, layout: Layout, low: int, out: torch.Tensor) -> None:
        """Fill `out` with elements of the flattened tensor, from element `low` on."""
        for piece in layout.pieces(low, low + out.numel()):
            if piece.is_run:
                self._fill(piece.source, piece.first, out[piece.at : piece.at + piece.elements])
                continue
            slab = self._slab(piece, out.dtype)
            values = slab.as_strided(piece.shape, piece.strides, piece.first - piece.slab[0])
            start = out.storage_offset() + piece.at
            out.as_strided(piece.shape, piece.into, start).copy_(values)

    def _slab(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        begin, end = piece.slab
        key = (piece.source, begin)
        with self._lock:
            future = self._slabs.get(key)
            is_new = future is None
            if future is None:
                future = self._slabs[key] = Future()
                while len(self._slabs) > SLABS:
                    self._slabs.popitem(last=False)
            else:
                self._slabs.move_to_end(key)
        if is_new:
            try:
                slab = torch.empty(end - begin, dtype=dtype)
                self._fill(piece.source, begin, slab)
                future.set_result(slab)
            except BaseException as error:
                future.set_exception(error)
                with self._lock:
                    self._slabs.pop(key, None)
        return future.result()
