"""Attention of one row by torch's own operations. Room: hold."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.kv import decode_attention
from penstock.kv.cache import send
from penstock.kv.errors import KvWarning, first_line
from penstock.kv.views import flat_view


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    *,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    found = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=scaling,
        is_causal=causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2)


def capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor,
    cap: float,
) -> torch.Tensor:
    """One row with capped scores, for which there is no fused kernel. Heads that share keys are
    computed as more queries of one head, so that keys need not be repeated."""
    _, heads, new, head = query.shape
    shared = key.shape[1]
    grouped = query[0].reshape(shared, heads // shared * new, head)
    scale = scaling if scaling is not None else head**-0.5
    scores = torch.bmm(grouped, key[0].transpose(1, 2)) * scale
    scores = torch.tanh(scores / cap) * cap
    scores = scores.view(shared, heads // shared, new, -1).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    found = torch.bmm(weights.view(shared, heads // shared * new, -1), value[0])
    return found.view(1, heads, new, head).transpose(1, 2)


# --------
# Attention of a long prompt's next chunk, in two parts that are joined. Room: hold.
#
# Queries of a chunk see all that was read before, and of the chunk itself what lies not after
# them.
# From Hopper on, cuDNN's kernels are faster than the flash kernel, but they align a causal mask
# with
# the first key. So the two parts are computed by one call each, and joined by their sums of
# weights.
# A prompt that is read 4096 tokens at a time then takes about as long as one that is read at
# once.

OLDEST = (9, 0)
"""Compute capability from which on cuDNN's kernels are the faster ones."""

LEAST = 512
"""Queries below which one call of the flash kernel is as good."""

WIDEST = 128
"""Head size up to which cuDNN has kernels for every layout."""

BLOCK = 16
"""Queries that a program joins."""

Part = tuple[torch.Tensor, torch.Tensor]
"""[rows, heads, queries, head size], and the logarithm of the sum of weights of each query."""

_refused: set[str] = set()
_switches: Any = torch.backends.cuda


def fits(query: torch.Tensor) -> bool:
    """Whether such queries can be had this way."""
    _, _, new, head = query.shape
    return (
        query.is_cuda
        and new >= LEAST
        and head <= WIDEST
        and head % 8 == 0
        and query.dtype in (torch.bfloat16, torch.float16)
        and not _refused
        and _switches.cudnn_sdp_enabled()
        and _new_enough(query.device)
    )


@functools.cache
def _new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST and decode_attention.available(device)


def attend_joined(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scaling: float | None
) -> torch.Tensor | None:
    """Of rows that all hold `length` tokens before: [rows, queries, heads, head size]. None if
    cuDNN refuses; it is not asked again then."""
    end = length + query.shape[2]
    keys, values = ((t[:, :, :length], t[:, :, length:end]) for t in (key, value))
    try:
        before = part(query, keys[0], values[0], scaling, causal=False)
        own = part(query, keys[1], values[1], scaling, causal=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as refused:
        _refused.add(str(refused))
        warnings.warn(
            "cuDNN's attention cannot be used for prompts, which are read more slowly: "
            + first_line(refused),
            KvWarning,
            stacklevel=2,
        )
        return None
    return join(before, own)


def part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, *,
    causal: bool,
) -> Part:  # fmt: skip
    rows, heads, new, _ = query.shape
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scaling
    )
    return found[0], found[1].reshape(rows, heads, new)


def join(first: Part, second: Part) -> torch.Tensor:
    """Both parts of the same queries: [rows, queries, heads, head size]."""
    (x, above), (y, below) = first, second
    if not decode_attention.available(x.device):
        share = torch.sigmoid(above - below)[..., None]
        return (x * share + y * (1 - share)).to(x.dtype).transpose(1, 2)
    rows, heads, new, head = x.shape
    out = torch.empty(rows, new, heads, head, dtype=x.dtype, device=x.device)
    with decode_attention.on(x.device):
        decode_attention.kernels().blend_kernel[(-(-new // BLOCK), heads, rows)](
            x, y, above.contiguous(), below.contiguous(), out, new,
            *x.stride()[:3], *y.stride()[:3],
            HEAD=head, HEAD_PAD=decode_attention.power(head), BLOCK=BLOCK,
        )  # fmt: skip
    return out


# --------
# Attention over rows of known lengths, by torch's kernels. Room: hold.
#
# Keys and values are the cache's own views, [rows, heads, tokens, head size].

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

    def spots(self, device: torch.device, per_slot: int) -> decode_attention.Spots:
        """For the decode kernel: rows that are neighbours."""
        if per_slot not in self._made:
            starts = [row * per_slot for row in range(len(self.lengths))]
            ends = [length + 1 for length in self.lengths]
            self._made[per_slot] = tuple(send(each, torch.int64, device) for each in (starts, ends))
        first, end = self._made[per_slot]
        return decode_attention.Spots(first, end, decode_attention.bucket(max(self.lengths) + 1))


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
        if length > 0 and not self._cuts(length + new) and fits(query):
            found = attend_joined(query, key, value, length, self.scaling)
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


# --------
# Attention over rows of a cache that are not equally long. Room: hold.
#
# Keys and values are the cache's own views, [rows, heads, tokens, head size], never copied and
# never
# repeated for grouped queries. No mask comes from transformers: the rows' lengths say what each
# query
# sees. It is registered with transformers under the name `penstock-kv`.
#
# Four ways, all of the same result:
# - each row on its own (everywhere, and what the CPU does);
# - one new token a row: Penstock's own kernel, where Triton is there; see `decode`;
# - rows of one length, or one row: the flash kernel over the batch;
# - rows of many lengths: the flash kernel for variable lengths, over all slots as one run of
# tokens,
#   told where each row begins and how much of it to read.

NAME = "penstock-kv"

_current = threading.local()


def rows(lengths: Sequence[int], new: int) -> contextlib.AbstractContextManager[None]:
    """Attention of this thread is over such rows."""
    return _over(Rows(tuple(lengths), new))


def spots(where: decode_attention.Spots) -> contextlib.AbstractContextManager[None]:
    """Attention of this thread is over rows that lie there, and of one new token each."""
    return _over(where)


@contextlib.contextmanager
def _over(now: Rows | decode_attention.Spots) -> Iterator[None]:
    before = getattr(_current, "rows", None)
    _current.rows = now
    try:
        yield
    finally:
        _current.rows = before


def register(name: str = NAME, function: Callable[..., Any] | None = None) -> None:
    """Make a name known to transformers: ours, or another way to attend."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    interface.register(name, function or attend)


def configs_of(model: Any) -> list[Any]:
    """Each config that some part of the model asks how to attend."""
    found = {id(held): held for part in model.modules() if (held := getattr(part, "config", None))}
    return list(found.values())


@contextlib.contextmanager
def chosen(configs: Sequence[Any]) -> Iterator[None]:
    """Models of these configs attend this way inside, and as before outside."""
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls."""
    assert attention_mask is None, "transformers made a mask that is not needed"
    assert s_aux is None, "attention sinks are refused when the generator is made"
    return over_rows(query, key, value, scaling, sliding_window, softcap), None


def over_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Over the rows that this thread is about: [rows, tokens, heads, head size]."""
    now: Rows | decode_attention.Spots | None = getattr(_current, "rows", None)
    assert now is not None, "attention over a cache outside of rows()"
    how = (scaling, window, softcap)
    if query.shape[2] == 1 and decode_attention.fits(query.device, query.dtype, query.shape[-1]):
        if isinstance(now, Rows):
            now = now.spots(query.device, key.stride(0) // key.stride(2))
        return decode_attention.attend(query, key, value, now, *how)
    if isinstance(now, decode_attention.Spots):
        return _each_spot(query, key, value, now, *how)
    one = Attention(now, *how)
    if not flash_fits(query, softcap):
        return one.by_rows(query, key, value)
    return one.flash(query, key, value)


def _each_spot(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, where: decode_attention.Spots,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Without the kernel, where reading lengths stops nothing: on the CPU."""
    count, heads, _, head = query.shape
    found = query.new_zeros(count, 1, heads, head)
    per_slot = key.stride(0) // key.stride(2)
    for at, (start, end) in enumerate(zip(where.starts.tolist(), where.ends.tolist(), strict=True)):
        row = start // per_slot
        if end > 0:
            one = Attention(Rows((end - 1,), 1), scaling, window, softcap)
            found[at] = one.by_rows(query[at : at + 1], key[row : row + 1], value[row : row + 1])[0]
    return found
