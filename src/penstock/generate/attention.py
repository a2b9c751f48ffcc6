"""Attention over rows of a KV cache that differ in length.

Keys and values are the cache's own views, `[rows, heads, tokens, head size]`. They are never
copied, and never repeated for grouped queries. No mask is involved: the lengths of the rows say
what each query sees. transformers knows this implementation as `CACHED_ROWS`.

`attend_rows` chooses among four ways that give the same result:

- one new token per row: Penstock's own kernel, where Triton is available
  (`penstock.kv.decode_attention`);
- one row, or rows of equal lengths: torch's flash kernel over the batch, or for the later chunks of
  long prompts cuDNN's kernel in two calls whose results are joined;
- rows of different lengths: the variable-length flash kernel over all slots as one run of tokens,
  with the start and the length of each row;
- everything else, and everything on a CPU: one row at a time with torch's own operations.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.kv import decode_attention
from penstock.kv.decode_attention import RowSpans
from penstock.kv.errors import KvWarning, first_line
from penstock.kv.views import copy_to_device, flatten_rows
from penstock.model.attention import (
    CACHED_ROWS,
    AttentionOptions,
    attention_function,
    current_scope,
    register,
)

BAND = 256
"""Number of queries that share a mask, or a table of capped scores."""

FLASH_MAX_HEAD = 256
"""Largest head size that the flash kernel supports."""

CUDNN_MIN_CAPABILITY = (9, 0)
"""Compute capability from which on cuDNN's kernels are faster than the flash kernel."""

CUDNN_MIN_QUERIES = 512
"""Number of queries below which one call of the flash kernel is as fast as two of cuDNN's."""

CUDNN_MAX_HEAD = 128
"""Largest head size for which cuDNN has kernels for every layout."""

JOIN_BLOCK = 16
"""Number of queries that one program of the joining kernel handles."""

AttentionPart = tuple[torch.Tensor, torch.Tensor]
"""Attention over some of the keys, `[rows, heads, queries, head size]`, and the log-sum-exp of the
scores of each query, by which parts are weighted when they are joined."""

_cudnn_failures: set[str] = set()
"""Why cuDNN failed. After one failure it is not tried again."""

_switches: Any = torch.backends.cuda


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The lengths of adjacent rows in one forward pass."""

    lengths: tuple[int, ...]
    """Number of tokens that each row holds before the pass."""
    new: int
    """Number of tokens that each row gets in the pass."""
    _cached: dict[Any, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether all rows have the same length."""
        return len(set(self.lengths)) == 1

    def flash_arguments(
        self, device: torch.device, row_tokens: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where queries begin, where keys begin and how many keys each row has.

        The variable-length kernel takes them as tensors. They are the same for all layers with the
        same window, so they are made once per pass.
        """
        key = (row_tokens, window)
        if key not in self._cached:
            ends = [length + self.new for length in self.lengths]
            # For a single query, a window is the same as a row that begins later.
            limit = window if self.new == 1 else None
            skipped = [max(0, end - limit) if limit else 0 for end in ends]
            count = len(ends)
            lists = (
                [row * self.new for row in range(count + 1)],
                [*(row * row_tokens + skipped[row] for row in range(count)), count * row_tokens],
                [end - skip for end, skip in zip(ends, skipped, strict=True)],
            )
            self._cached[key] = tuple(copy_to_device(each, torch.int32, device) for each in lists)
        queries, keys, used = self._cached[key]
        return queries, keys, used

    def spans(self, device: torch.device, row_tokens: int) -> RowSpans:
        """Return the rows' spans in the cache, as the decode kernel takes them."""
        if row_tokens not in self._cached:
            starts = [row * row_tokens for row in range(len(self.lengths))]
            ends = [length + 1 for length in self.lengths]
            self._cached[row_tokens] = tuple(
                copy_to_device(each, torch.int64, device) for each in (starts, ends)
            )
        first, end = self._cached[row_tokens]
        return RowSpans(first, end, decode_attention.length_bound(max(self.lengths) + 1))


def register_row_attention() -> None:
    """Register attention over cached rows with transformers."""
    register(CACHED_ROWS, attend)


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attend over the rows that `attending_over` names: `[rows, tokens, heads, head size]`."""
    rows: RowLengths | RowSpans | None = current_scope()
    assert rows is not None, "attention over cached rows was called outside of attending_over()"
    options = (scaling, window, softcap)
    if query.shape[2] == 1 and decode_attention.fits(query.device, query.dtype, query.shape[-1]):
        if isinstance(rows, RowLengths):
            rows = rows.spans(query.device, key.stride(0) // key.stride(2))
        return decode_attention.attend(query, key, value, rows, *options)
    if isinstance(rows, RowSpans):
        return _attend_spans(query, key, value, rows, *options)
    attention = RowAttention(rows, *options)
    if not flash_fits(query, softcap):
        return attention.by_rows(query, key, value)
    return attention.flash(query, key, value)


def _attend_spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: RowSpans,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attend without the decode kernel, on a CPU, where reading the lengths is free."""
    count, heads, _, head = query.shape
    output = query.new_zeros(count, 1, heads, head)
    row_tokens = key.stride(0) // key.stride(2)
    for i, (start, end) in enumerate(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)):
        row = start // row_tokens
        if end > 0:
            attention = RowAttention(RowLengths((end - 1,), 1), scaling, window, softcap)
            output[i] = attention.by_rows(
                query[i : i + 1], key[row : row + 1], value[row : row + 1]
            )[0]
    return output


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend as transformers asks for it; generation has no dropout."""
    return attend_rows(query, key, value, options.scaling, options.window, options.softcap)


attend = attention_function(_attend)


class RowAttention:
    """One attention call of one layer, over rows of known lengths."""

    def __init__(
        self, rows: RowLengths, scaling: float | None, window: int | None, softcap: float | None
    ) -> None:
        self.rows, self.scaling, self.window, self.softcap = rows, scaling, window, softcap

    # With fused kernels

    def flash(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with the flash kernel or, where it is faster, another fused kernel."""
        if not self.rows.equal:
            return self._ragged(query, key, value)
        length, new = self.rows.lengths[0], self.rows.new
        if length == 0 and new > 1 and not self._window_cuts(new):
            keys, values = (t if t.shape[2] == new else t[:, :, :new] for t in (key, value))
            return sdpa(query, keys, values, self.scaling, causal=True)
        if length > 0 and not self._window_cuts(length + new) and cudnn_fits(query):
            output = attend_in_two_parts(query, key, value, length, self.scaling)
            if output is not None:
                return output
        first = self._first_key(length) if new == 1 else 0
        keys, values = (t[:, :, first : length + new].transpose(1, 2) for t in (key, value))
        return self._call_flash(query.transpose(1, 2), keys, values, None, None, None)

    def _ragged(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend over rows of different lengths with the variable-length kernel."""
        count, heads, new, head = query.shape
        slot, _, token, _ = key.stride()
        row_tokens = slot // token
        queries, starts, used = self.rows.flash_arguments(query.device, row_tokens, self.window)
        flat = query.transpose(1, 2).reshape(count * new, heads, head)
        keys, values = (flatten_rows(t, row_tokens) for t in (key, value))
        output = self._call_flash(flat, keys, values, queries, starts, used)
        return output.view(count, new, heads, head)

    def _call_flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        queries: torch.Tensor | None, starts: torch.Tensor | None, used: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Call the kernel with `[..., tokens, heads, head size]`."""
        new = self.rows.new
        many = new > 1
        longest = max(self.rows.lengths) + new
        if not many and self.window is not None:
            longest = min(longest, self.window)
        left = self.window - 1 if many and self.window is not None else -1
        return flash_forward(
            query, key, value, queries, starts, used,
            sizes=(new, longest), causal=many, left=left, scaling=self.scaling,
        )  # fmt: skip

    # Row by row

    def by_rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend one row at a time, with torch's own operations."""
        outputs = [
            self._row(query[i : i + 1], key[i : i + 1], value[i : i + 1], length)
            for i, length in enumerate(self.rows.lengths)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _row(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> torch.Tensor:
        new = self.rows.new
        if self.softcap is None and new == 1:
            span = slice(self._first_key(length), length + 1)
            return sdpa(query, key[:, :, span], value[:, :, span], self.scaling, causal=False)
        if self.softcap is None and length == 0 and not self._window_cuts(new):
            return sdpa(query, key[:, :, :new], value[:, :, :new], self.scaling, causal=True)
        bands = [
            self._band(query, key, value, length, low, min(low + BAND, new))
            for low in range(0, new, BAND)
        ]
        return bands[0] if len(bands) == 1 else torch.cat(bands, dim=1)

    def _band(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        length: int, low: int, high: int,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with queries `low` to `high` of a row, over the keys that any of them sees."""
        first, end = self._first_key(length + low), length + high
        position = torch.arange(length + low, end, device=query.device)[:, None]
        keys_at = torch.arange(first, end, device=query.device)[None, :]
        mask = keys_at <= position
        if self.window is not None:
            mask &= keys_at > position - self.window
        queries, keys, values = query[:, :, low:high], key[:, :, first:end], value[:, :, first:end]
        if self.softcap is None:
            return sdpa(queries, keys, values, self.scaling, causal=False, mask=mask)
        return capped_attention(queries, keys, values, self.scaling, mask, self.softcap)

    def _first_key(self, position: int) -> int:
        """Return the first key that a query at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def _window_cuts(self, tokens: int) -> bool:
        """Return whether the window hides some of the first `tokens` tokens from the last one."""
        return self.window is not None and self.window < tokens


# torch's own operations.


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    *,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with torch's scaled dot-product attention: `[rows, queries, heads, head size]`."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """Attend with capped scores, for which there is no fused kernel, over one row.

    Query heads that share keys are computed as more queries of one head, so that keys need not be
    repeated.
    """
    _, heads, new, head = query.shape
    shared = key.shape[1]
    grouped = query[0].reshape(shared, heads // shared * new, head)
    scale = scaling if scaling is not None else head**-0.5
    scores = torch.bmm(grouped, key[0].transpose(1, 2)) * scale
    scores = torch.tanh(scores / cap) * cap
    scores = scores.view(shared, heads // shared, new, -1).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = torch.bmm(weights.view(shared, heads // shared * new, -1), value[0])
    return output.view(1, heads, new, head).transpose(1, 2)


# The flash kernel.


def flash_fits(query: torch.Tensor, softcap: float | None) -> bool:
    """Return whether the flash kernel supports such queries."""
    head = query.shape[-1]
    return (
        query.is_cuda
        and softcap is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and head % 8 == 0
        and head <= FLASH_MAX_HEAD
    )


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    queries: torch.Tensor | None, starts: torch.Tensor | None, used: torch.Tensor | None, *,
    sizes: tuple[int, int], causal: bool, left: int, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Call the flash kernel; nothing else in this module does.

    The kernel aligns a causal mask with the last key. Of row i it reads the `used[i]` keys from
    `starts[i]` on. `left` is how many keys before its own a query sees; -1 means all.
    """
    results = torch.ops.aten._flash_attention_forward(
        query, key, value, queries, starts, *sizes, 0.0, causal, False,
        scale=scaling, window_size_left=left, window_size_right=0 if causal else -1,
        seqused_k=used,
    )  # fmt: skip
    output: torch.Tensor = results[0]
    return output


# cuDNN's kernel, in two parts.
#
# The queries of a prompt's later chunk see everything that was read before, and of the chunk itself
# what does not come after them. From Hopper on, cuDNN's kernels are faster than the flash kernel,
# but they align a causal mask with the first key, not the last. So the two parts are computed by
# one call each and joined. A prompt that is read 4096 tokens at a time then takes about as long as
# one that is read in one piece.


def cudnn_fits(query: torch.Tensor) -> bool:
    """Return whether cuDNN's kernel supports such queries and is worth using."""
    _, _, new, head = query.shape
    return (
        query.is_cuda
        and new >= CUDNN_MIN_QUERIES
        and head <= CUDNN_MAX_HEAD
        and head % 8 == 0
        and query.dtype in (torch.bfloat16, torch.float16)
        and not _cudnn_failures
        and _switches.cudnn_sdp_enabled()
        and _is_new_enough(query.device)
    )


@functools.cache
def _is_new_enough(device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    return capability >= CUDNN_MIN_CAPABILITY and decode_attention.available(device)


def attend_in_two_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scaling: float | None
) -> torch.Tensor | None:
    """Attend over rows that all hold `length` tokens from earlier chunks.

    Returns `[rows, queries, heads, head size]`, or None if cuDNN refuses; it is not tried again
    then.
    """
    end = length + query.shape[2]
    keys, values = ((t[:, :, :length], t[:, :, length:end]) for t in (key, value))
    try:
        earlier = cudnn_part(query, keys[0], values[0], scaling, causal=False)
        own = cudnn_part(query, keys[1], values[1], scaling, causal=True)
    except torch.OutOfMemoryError:
        raise  # it is a RuntimeError too, but says nothing about cuDNN
    except RuntimeError as error:
        _cudnn_failures.add(str(error))
        warnings.warn(
            f"cuDNN's attention failed, so prompts are read more slowly: {first_line(error)}",
            KvWarning,
            stacklevel=2,
        )
        return None
    return join_parts(earlier, own)


def cudnn_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *,
    causal: bool,
) -> AttentionPart:  # fmt: skip
    """Call cuDNN's kernel."""
    rows, heads, new, _ = query.shape
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scaling
    )
    return results[0], results[1].reshape(rows, heads, new)


def join_parts(first: AttentionPart, second: AttentionPart) -> torch.Tensor:
    """Join the two parts of the same queries: `[rows, queries, heads, head size]`."""
    (x, x_log_sum), (y, y_log_sum) = first, second
    if not decode_attention.available(x.device):
        share = torch.sigmoid(x_log_sum - y_log_sum)[..., None]
        return (x * share + y * (1 - share)).to(x.dtype).transpose(1, 2)
    rows, heads, new, head = x.shape
    out = torch.empty(rows, new, heads, head, dtype=x.dtype, device=x.device)
    with decode_attention.current_device(x.device):
        decode_attention.kernels().blend_kernel[(-(-new // JOIN_BLOCK), heads, rows)](
            x, y, x_log_sum.contiguous(), y_log_sum.contiguous(), out, new,
            *x.stride()[:3], *y.stride()[:3],
            HEAD=head, HEAD_PAD=decode_attention.next_power_of_two(head), BLOCK=JOIN_BLOCK,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out
