"""The sequences that the model sees as rows now. Room: hold."""

from __future__ import annotations

import functools
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
        self.first = first
        """The first of its rows in the cache."""
        self.sequences = tuple(sequences)
        self._past = [sequence.length for sequence in sequences]
        self._room = [sequence.room for sequence in sequences]
        self.longest = max(self._past)
        """Tokens of the longest row before this call of the model."""
        self._even = min(self._past) == self.longest
        self._least_room, self._most_room = min(self._room), max(self._room)
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def _device(self) -> torch.device:
        return self._views.flat[0][0].device

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row before this call of the model."""
        return send(self._past, torch.int32, self._device)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """Where each row begins in `flat`, and where the last would end: as a variable-length
        kernel wants it, beside the number of tokens used of each."""
        steps = torch.arange(len(self) + 1, dtype=torch.int32, device=self._device)
        return steps * self._layout.row_tokens

    def reach(self, new: int) -> int:
        """Tokens of the longest row after a call with `new` tokens a row."""
        if new <= self._least_room:  # asked for every layer
            return self.longest + new
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

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> Pair:
        """Add `[rows, heads, new, head dim]`, each row at its own length; all that is there then,
        as `padded` has it. A row that was prepared for fewer tokens takes its first ones: the rest
        are padding."""
        new = self._check(keys)
        every = self.padded(layer, new)
        if not (self._even and new <= self._least_room):
            self._scatter(keys, values, layer)
            return every
        past = self.longest
        for whole, source in zip(every, (keys, values), strict=True):
            target = whole.narrow(2, past, new) if past else whole
            target.copy_(source.detach())
        return every

    def _scatter(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        new = keys.shape[2]
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
            device = self._device
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
        if new > self._most_room:
            raise BatchError(
                f"the model was given {new} tokens a row and the batch is prepared for "
                f"{self._most_room}; call prepare first"
            )
        return new


def send(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers to the device without waiting for it: torch's own way stops until the stream
    is empty."""
    here = torch.as_tensor(numbers, dtype=dtype)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
