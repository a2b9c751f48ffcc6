"""What a pass that makes one token a row is told about its rows, on the device. Room: hold.

Rows need not be neighbours: each is told where it begins. Nothing about lengths is on the host
while the model runs, so the same launches serve every token; before each pass one packed copy says
what is new. Rows of the slate that stand for no sequence have no tokens and write into a place that
nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import torch

from penstock.kv import decode_attention
from penstock.kv.decode_attention import Spots
from penstock.kv.errors import BatchError
from penstock.kv.slots import Sequence
from penstock.kv.views import Pair, RowViews

_TOKENS, _POSITIONS, _ENDS, _STARTS, _PLACES = range(5)


class DecodeBatch:
    """Buffers for `rows` rows, of which none becomes longer than `longest` tokens."""

    def __init__(
        self, rows: int, longest: int, *, views: RowViews, row_tokens: int, scratch: int
    ) -> None:
        self._views, self._row_tokens, self._scratch = views, row_tokens, scratch
        self.longest = longest
        device = views.flat[0][0].device
        self._device = torch.zeros(5, rows, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._host = torch.zeros(5, rows, dtype=torch.int64, pin_memory=pinned)
        self._numbers = self._host.numpy()
        self._sent: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.tokens = self._device[_TOKENS][:, None]
        """What the model reads, [rows, 1]."""
        self.positions = self._device[_POSITIONS][:, None]
        self.spots = Spots(self._device[_STARTS], self._device[_ENDS], longest)
        self._places = self._device[_PLACES]

    def __len__(self) -> int:
        return self._device.shape[1]

    def fill(self, sequences: Listed[Sequence], tokens: Listed[int], lengths: Listed[int]) -> None:
        """What the next pass is about, each row's new token behind the `lengths` it has. The device
        gets it in the order of its stream."""
        self._check(sequences)
        count = len(sequences)
        if self._sent is not None:
            self._sent.synchronize()  # the last copy has left the buffer, long since as a rule
        numbers = self._numbers
        numbers[:] = 0
        numbers[_TOKENS, :count] = tokens
        numbers[_POSITIONS, :count] = lengths
        numbers[_ENDS, :count] = [length + 1 for length in lengths]
        numbers[_STARTS, :count] = [(each.slot or 0) * self._row_tokens for each in sequences]
        numbers[_PLACES] = numbers[_STARTS] + numbers[_POSITIONS]
        numbers[_PLACES, count:] = self._scratch
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    # What the cache asks of the rows that a model sees, as of a `Batch`.

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> Pair:
        """Add `[rows, heads, 1, head dim]`, each row at its own place. Keys and values of all rows
        of the cache, `[rows, heads, row_tokens, head dim]`: what may be read of them, `spots`
        says."""
        targets = self._views.flat[layer]
        if decode_attention.fits(keys.device, keys.dtype, keys.shape[-1]):
            decode_attention.write(keys.detach(), values.detach(), *targets, self._places)
        else:
            for target, source in zip(targets, (keys, values), strict=True):
                target.index_copy_(0, self._places, source.detach().squeeze(2))
        return self._views.rows[layer]

    def reach(self, _new: int) -> int:
        return self.longest

    def _check(self, sequences: Listed[Sequence]) -> None:
        if not 0 < len(sequences) <= len(self):
            raise BatchError(f"{len(sequences)} sequences for a slate of {len(self)} rows")
        for sequence in sequences:
            if not sequence.resident or sequence.room < 1 or sequence.length >= self.longest:
                raise BatchError(
                    f"{sequence!r} has room for {sequence.room} tokens, up to {self.longest} in "
                    f"all here; call prepare first"
                )
