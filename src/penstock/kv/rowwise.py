"""Attention over rows of known lengths, by torch's kernels. Room: hold.

Keys and values are the cache's own views, [rows, heads, tokens, head size].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.kv import decode, joined
from penstock.kv.batch import send
from penstock.kv.plain import capped, sdpa
from penstock.kv.views import flat_view

BAND = 256
"""Queries that share a mask, or a table of capped scores."""

FLASH_HEAD = 256
"""The widest head that the flash kernel knows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of one forward pass hold."""

    lengths: tuple[int, ...]
    """Tokens that each row holds before this pass."""
    new: int
    """Tokens that each row gets in it."""
    _made: dict[Any, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def even(self) -> bool:
        return len(set(self.lengths)) == 1

    def spans(
        self, device: torch.device, per_slot: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the variable-length kernel: where queries begin, where keys begin, how many keys.
        Made once per pass and kind of layer."""
        key = (per_slot, window)
        if key not in self._made:
            ends = [length + self.new for length in self.lengths]
            cut = window if self.new == 1 else None  # one query: its window is a shorter row
            skip = [max(0, end - cut) if cut else 0 for end in ends]
            count = len(ends)
            lists = (
                [row * self.new for row in range(count + 1)],
                [*(row * per_slot + skip[row] for row in range(count)), count * per_slot],
                [end - less for end, less in zip(ends, skip, strict=True)],
            )
            self._made[key] = tuple(send(each, torch.int32, device) for each in lists)
        queries, keys, used = self._made[key]
        return queries, keys, used

    def spots(self, device: torch.device, per_slot: int) -> decode.Spots:
        """For the decode kernel: rows that are neighbours."""
        if per_slot not in self._made:
            starts = [row * per_slot for row in range(len(self.lengths))]
            ends = [length + 1 for length in self.lengths]
            self._made[per_slot] = tuple(send(each, torch.int64, device) for each in (starts, ends))
        first, end = self._made[per_slot]
        return decode.Spots(first, end, decode.bucket(max(self.lengths) + 1))


class Attention:
    """One call of one layer."""

    def __init__(
        self, now: Rows, scaling: float | None, window: int | None, softcap: float | None
    ) -> None:
        self.now, self.scaling, self.window, self.softcap = now, scaling, window, softcap

    # By the flash kernels.

    def flash(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not self.now.even:
            return self._ragged(query, key, value)
        length, new = self.now.lengths[0], self.now.new
        if length == 0 and new > 1 and not self._cuts(new):
            keys, values = (t if t.shape[2] == new else t[:, :, :new] for t in (key, value))
            return sdpa(query, keys, values, self.scaling, causal=True)
        if length > 0 and not self._cuts(length + new) and joined.fits(query):
            found = joined.attend(query, key, value, length, self.scaling)
            if found is not None:
                return found
        first = self._first(length) if new == 1 else 0
        keys, values = (t[:, :, first : length + new].transpose(1, 2) for t in (key, value))
        return self._call(query.transpose(1, 2), keys, values, None, None, None)

    def _ragged(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        count, heads, new, head = query.shape
        slot, _, token, _ = key.stride()
        per_slot = slot // token
        queries, starts, used = self.now.spans(query.device, per_slot, self.window)
        flat = query.transpose(1, 2).reshape(count * new, heads, head)
        keys, values = (flat_view(t, per_slot) for t in (key, value))
        found = self._call(flat, keys, values, queries, starts, used)
        return found.view(count, new, heads, head)

    def _call(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        queries: torch.Tensor | None, starts: torch.Tensor | None, used: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Tensors are [..., tokens, heads, head size]; a causal mask ends at the last key."""
        new = self.now.new
        many = new > 1
        longest = max(self.now.lengths) + new
        if not many and self.window is not None:
            longest = min(longest, self.window)
        left = self.window - 1 if many and self.window is not None else -1
        return kernel(
            query, key, value, queries, starts, used,
            sizes=(new, longest), causal=many, left=left, scaling=self.scaling,
        )  # fmt: skip

    # Row by row.

    def by_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = [
            self._row(query[at : at + 1], key[at : at + 1], value[at : at + 1], length)
            for at, length in enumerate(self.now.lengths)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _row(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> torch.Tensor:
        new = self.now.new
        if self.softcap is None and new == 1:
            span = slice(self._first(length), length + 1)
            return sdpa(query, key[:, :, span], value[:, :, span], self.scaling, causal=False)
        if self.softcap is None and length == 0 and not self._cuts(new):
            return sdpa(query, key[:, :, :new], value[:, :, :new], self.scaling, causal=True)
        parts = [
            self._band(query, key, value, length, low, min(low + BAND, new))
            for low in range(0, new, BAND)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _band(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        length: int, low: int, high: int,
    ) -> torch.Tensor:  # fmt: skip
        """Queries `low` to `high` of the row, over the keys that any of them sees."""
        first, end = self._first(length + low), length + high
        at = torch.arange(length + low, end, device=query.device)[:, None]
        seen = torch.arange(first, end, device=query.device)[None, :]
        mask = seen <= at
        if self.window is not None:
            mask &= seen > at - self.window
        part, keys, values = query[:, :, low:high], key[:, :, first:end], value[:, :, first:end]
        if self.softcap is None:
            return sdpa(part, keys, values, self.scaling, causal=False, mask=mask)
        return capped(part, keys, values, self.scaling, mask, self.softcap)

    def _first(self, position: int) -> int:
        """The first key that a query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def _cuts(self, tokens: int) -> bool:
        return self.window is not None and self.window < tokens


def flash_fits(query: torch.Tensor, softcap: float | None) -> bool:
    """Whether the flash kernel can be had for such queries."""
    head = query.shape[-1]
    return (
        query.is_cuda
        and softcap is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and head % 8 == 0
        and head <= FLASH_HEAD
    )


def kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    queries: torch.Tensor | None, starts: torch.Tensor | None, used: torch.Tensor | None, *,
    sizes: tuple[int, int], causal: bool, left: int, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """The one call of the flash kernel. It aligns a causal mask with the last key, and reads of row
    i the `used[i]` keys from `starts[i]` on."""
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, queries, starts, *sizes, 0.0, causal, False,
        scale=scaling, window_size_left=left, window_size_right=0 if causal else -1,
        seqused_k=used,
    )  # fmt: skip
    answer: torch.Tensor = found[0]
    return answer
