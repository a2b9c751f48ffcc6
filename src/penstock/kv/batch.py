"""The sequences that the model sees as rows now. Room: hold."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import torch

from penstock.kv.errors import BatchError
from penstock.kv.layout import Layout
from penstock.kv.slots import Sequence
from penstock.kv.views import Pair, RowViews


class Batch:
    """Neighbouring rows of different lengths. It lives as long as its `with` block."""

    def __init__(
        self, views: RowViews, layout: Layout, first: int, sequences: Listed[Sequence]
    ) -> None:
        self._views, self._layout = views, layout
        device = views.flat[0][0].device
        self.first = first
        """The first of its rows in the cache."""
        self.sequences = tuple(sequences)
        self._past = [sequence.length for sequence in sequences]
        self._room = [sequence.room for sequence in sequences]
        self.longest = max(self._past)
        """Tokens of the longest row before this call of the model."""
        self.lengths = send(self._past, torch.int32, device)
        """Tokens of each row before this call of the model."""
        steps = torch.arange(len(self.sequences) + 1, dtype=torch.int32, device=device)
        self.starts = steps * layout.row_tokens
        """Where each row begins in `flat`, and where the last would end: as a variable-length
        kernel wants it, beside the number of tokens used of each."""
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    def reach(self, new: int) -> int:
        """Tokens of the longest row after a call with `new` tokens a row."""
        ends = (p + min(new, room) for p, room in zip(self._past, self._room, strict=True))
        return max(ends)

    def flat(self, layer: int) -> Pair:
        """Keys and values `[rows * row_tokens, heads, head dim]`; only what tokens fill may be
        read."""
        keys, values = self._views.flat[layer]
        start = self.first * self._layout.row_tokens
        end = start + len(self) * self._layout.row_tokens
        return keys[start:end], values[start:end]

    def padded(self, layer: int, new: int) -> Pair:
        """Keys and values `[rows, heads, longest, head dim]`, zeros or leavings behind the short
        ones."""
        return self._views.span(layer, self.first, len(self), 0, self.reach(new))

    def write(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Add `[rows, heads, new, head dim]`, each row at its own length. A row that was prepared
        for fewer tokens takes its first ones: the rest are padding."""
        new = self._check(keys)
        if min(self._room) >= new and min(self._past) == self.longest:
            span = self._views.span(layer, self.first, len(self), self.longest, self.longest + new)
            for target, source in zip(span, (keys, values), strict=True):
                target.copy_(source.detach())
            return
        places, chosen = self._where(new)
        for target, source in zip(self._views.flat[layer], (keys, values), strict=True):
            tokens = source.detach().transpose(1, 2).flatten(0, 1)
            target.index_copy_(0, places, tokens if chosen is None else tokens[chosen])

    def _where(self, new: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where in the flat view the tokens go, and which of them; the same for every layer."""
        if new not in self._places:
            places: list[int] = []
            chosen: list[int] = []
            row_tokens = self._layout.row_tokens
            for i, (past, room) in enumerate(zip(self._past, self._room, strict=True)):
                start, kept = (self.first + i) * row_tokens + past, min(new, room)
                places.extend(range(start, start + kept))
                chosen.extend(range(i * new, i * new + kept))
            device = self.lengths.device
            whole = len(chosen) == new * len(self)
            self._places[new] = (
                send(places, torch.int64, device),
                None if whole else send(chosen, torch.int64, device),
            )
        return self._places[new]

    def _check(self, keys: torch.Tensor) -> int:
        count, heads, new, dim = keys.shape
        wanted = (len(self), self._layout.heads, self._layout.head_dim)
        if (count, heads, dim) != wanted:
            raise BatchError(
                f"keys of {count} rows, {heads} heads of {dim} for a batch of {wanted[0]} rows, "
                f"{wanted[1]} heads of {wanted[2]}; give the model as many rows as `rows` was given"
            )
        if new > max(self._room):
            raise BatchError(
                f"the model was given {new} tokens a row and the batch is prepared for "
                f"{max(self._room)}; call prepare first"
            )
        return new


def send(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Lists of numbers to the device without waiting for it: torch's own way stops until the stream
    is empty."""
    here = torch.tensor(numbers, dtype=dtype)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
