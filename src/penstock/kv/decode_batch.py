"""The inputs of passes that generate one token per row, in fixed buffers on the device.

Rows need not be adjacent: each has its own start. The host decides nothing by the rows' lengths
while the model runs, so the same launches serve every token, and a CUDA graph can replay them.
Before each pass, one packed copy updates all buffers. Rows of the batch without a sequence are
padding: they have no tokens, and write to a position that nothing reads.
"""

from __future__ import annotations

from collections import abc
from typing import Any

import torch

from penstock.kv import decode_attention
from penstock.kv.decode_attention import RowSpans
from penstock.kv.errors import BatchError
from penstock.kv.slots import Sequence
from penstock.kv.views import KeysAndValues, RowViews

_TOKENS, _POSITIONS, _ENDS, _STARTS, _TARGETS = range(5)
"""Rows of the packed buffer."""


class DecodeBatch:
    """Buffers for `rows` rows of at most `longest` tokens.

    `scratch` is the position, in tokens from the first row's start, that padding rows write to.
    """

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
        self._copied: Any = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.tokens = self._device[_TOKENS][:, None]
        """The model's `input_ids`, `[rows, 1]`."""
        self.positions = self._device[_POSITIONS][:, None]
        """The model's `position_ids`, `[rows, 1]`."""
        self.spans = RowSpans(self._device[_STARTS], self._device[_ENDS], longest)
        """The positions of the rows in the cache."""
        self._targets = self._device[_TARGETS]

    def __len__(self) -> int:
        return self._device.shape[1]

    def fill(
        self, sequences: abc.Sequence[Sequence], tokens: abc.Sequence[int],
        lengths: abc.Sequence[int],
    ) -> None:  # fmt: skip
        """Set the rows of the next pass: each sequence's new token, after the `lengths` it holds.

        The copy to the device is ordered on the current stream, before the pass that follows.
        """
        self._check(sequences)
        count = len(sequences)
        if self._copied is not None:
            # The previous copy must have left the pinned buffer; usually it did long ago.
            self._copied.synchronize()
        numbers = self._numbers
        numbers[:] = 0
        numbers[_TOKENS, :count] = tokens
        numbers[_POSITIONS, :count] = lengths
        numbers[_ENDS, :count] = [length + 1 for length in lengths]
        numbers[_STARTS, :count] = [(each.slot or 0) * self._row_tokens for each in sequences]
        numbers[_TARGETS] = numbers[_STARTS] + numbers[_POSITIONS]
        numbers[_TARGETS, count:] = self._scratch
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    # The cache uses these as it uses those of `Batch`.

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> KeysAndValues:
        """Write `[rows, heads, 1, head dim]`, each row at its own position.

        Returns the keys and values of all rows of the cache, `[rows, heads, row_tokens, head dim]`.
        Only what `spans` covers may be read.
        """
        targets = self._views.flat[layer]
        if decode_attention.fits(keys.device, keys.dtype, keys.shape[-1]):
            decode_attention.write(keys.detach(), values.detach(), *targets, self._targets)
        else:
            for target, source in zip(targets, (keys, values), strict=True):
                target.index_copy_(0, self._targets, source.detach().squeeze(2))
        return self._views.rows[layer]

    def length_after(self, _new: int) -> int:
        """Return the bound of lengths, which does not change from token to token."""
        return self.longest

    def _check(self, sequences: abc.Sequence[Sequence]) -> None:
        if not 0 < len(sequences) <= len(self):
            raise BatchError(
                f"{len(sequences)} sequences do not fit a decode batch of {len(self)} rows; it "
                f"takes 1 to {len(self)}"
            )
        for sequence in sequences:
            if not sequence.resident or sequence.room < 1 or sequence.length >= self.longest:
                raise BatchError(
                    f"{sequence!r} is prepared for {sequence.room} more tokens, and this decode "
                    f"batch needs 1, below {self.longest} tokens in all; call prepare first"
                )
