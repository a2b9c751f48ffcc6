"""One layer of the cache, as transformers wants to see it. Room: hold."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from transformers.cache_utils import Cache, CacheLayerMixin

from penstock.kv.address_space import open_space
from penstock.kv.decode_batch import DecodeBatch
from penstock.kv.errors import BatchError, BudgetError, ModelError, SequenceError
from penstock.kv.layout import Layout, read_layout
from penstock.kv.page_pool import PagePool
from penstock.kv.sequences import (
    SequenceTable,
    Stats,
    branch,
    count,
    cover_gaps,
    line_up,
    preempt,
    restore,
)
from penstock.kv.slots import Sequence
from penstock.kv.views import Pair, RowViews
from penstock.units import parse_bytes


class VirtualLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Counts a layer's tokens and hands out views; the bytes are the cache's.

    A layer with a sliding window keeps all tokens, as its neighbours in the page do, and shows the
    model those that its window reaches. No gradient flows through what is cached.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: VirtualCache, index: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index, self._length = cache, index, 0
        self.is_sliding = window is not None
        self.sliding_window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check once that the model is the one the cache was made for."""
        keys, values = self._cache.views.rows[self._index]
        for name, new, ours in (("keys", key_states, keys), ("values", value_states, values)):
            if new.dtype != ours.dtype or new.device != ours.device:
                raise ModelError(
                    f"the model gives {name} in {new.dtype} on {new.device} and the cache holds "
                    f"{ours.dtype} on {ours.device}; make it with that dtype and device"
                )
            if (new.shape[1], new.shape[3]) != (ours.shape[1], ours.shape[3]):
                raise ModelError(
                    f"the model gives {name} of {new.shape[1]} heads of {new.shape[3]} and the "
                    f"cache holds {ours.shape[1]} of {ours.shape[3]}; make it with this model's "
                    f"config"
                )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> Pair:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count, past = key_states.shape[0], self._length
        end = past + key_states.shape[2]
        first = self._cache.grow_own_rows(count, end)
        views = self._cache.views
        new = views.span(self._index, first, count, past, end)
        new[0].copy_(key_states.detach())
        new[1].copy_(value_states.detach())
        self._length = end
        return views.span(self._index, first, count, self._start(past), end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        batch = self._cache.batch
        if batch is not None:
            return batch.reach(query_length), 0
        start = self._start(self._length)
        return self._length + query_length - start, start

    def get_seq_length(self) -> int:
        batch = self._cache.batch
        return self._length if batch is None else batch.longest

    def get_max_length(self) -> int:
        return self._cache.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0 or -tokens_to_remove > self._length:
            raise SequenceError(
                f"crop takes a negative number of tokens to remove, at most {self._length}, got "
                f"{tokens_to_remove}"
            )
        self._length += tokens_to_remove

    def reset(self) -> None:
        self._length = 0

    def _start(self, past: int) -> int:
        """The first token that a query after `past` tokens can see."""
        if self.sliding_window is None:
            return 0
        return max(past - self.sliding_window + 1, 0)


# --------
# The sequences that the model sees as rows now. Room: hold.


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


# --------
# The cache that models and generators use. Room: hold.


class VirtualCache(Cache):
    """Keys and values in one address range that gets memory as sequences grow.

    As a transformers cache it is given to `generate(..., past_key_values=cache)`; its rows are then
    the cache's own. For continuous batching use `admit`, `prepare`, `rows`, `advance`, `finish`.
    Views it returned must not be used after `close`, nor after a later call that moves rows.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_batch: int,
        max_context: int,
        budget: str | int,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        page_nbytes: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        """`budget` is the most memory it takes. `max_batch` and `max_context` cost address space
        only. With a `pool`, pages come from there, within that pool's budget."""
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._own_pool = pool is None
        space = pool.space if pool else open_space(where, page_nbytes)
        try:
            layout = read_layout(
                config,
                dtype=dtype or getattr(config, "dtype", None) or torch.get_default_dtype(),
                page_nbytes=space.page_nbytes,
                max_context=max_context,
            )
            nbytes = parse_bytes(budget)
            if max_batch < 1 or nbytes < max_batch * space.page_nbytes:
                raise BudgetError(budget=nbytes, sequences=max_batch, page=space.page_nbytes)
            self._keeper = SequenceTable(pool or PagePool(space, nbytes), layout, max_batch)
        except BaseException:
            if self._own_pool:
                space.close()
            raise
        self._views = RowViews(self._keeper.table.rows(), layout)
        self._batch: Batch | DecodeBatch | None = None
        self._own_rows: list[Sequence] = []
        self._own_first = 0
        self._closed = False
        self._layers = [VirtualLayer(self, i, w) for i, w in enumerate(layout.windows)]
        super().__init__(layers=[*self._layers])

    # Continuous batching

    def admit(self, prefix: tuple[Sequence, int] | None = None, *, expect: int = 0) -> Sequence:
        """A new sequence in a free slot; with a prefix it begins with another's first tokens, whose
        pages both then share. `expect` tokens helps to choose among slots that kept pages. Raises
        NoSlot."""
        return self._keeper.admit(prefix, expect)

    def prepare(self, new: Iterable[tuple[Sequence, int]]) -> None:
        """Give each sequence memory for so many tokens more. All or nothing: CacheFull leaves
        everything as it was. Shared pages that would be written are copied here."""
        self._check_idle("prepare")
        self._keeper.prepare(new)

    @contextmanager
    def rows(self, sequences: Listed[Sequence], *, padded: bool = True) -> Iterator[Batch]:
        """Let the model see these sequences as its rows, in this order.

        Neighbours stay where they are; others are remapped (`arrange` gives the order that costs
        least). With `padded` all rows can be read up to the end of the longest; kernels that are
        told each row's length need not have that.
        """
        self._check_idle("rows")
        if not sequences:
            raise BatchError("a batch needs at least one sequence")
        with self._keeper.whole():
            first = line_up(self._keeper, sequences)
            if padded and len(sequences) > 1:
                cover_gaps(self._keeper, sequences)
            self._batch = batch = Batch(self._views, self._keeper.layout, first, sequences)
        try:
            yield batch
        finally:
            self._batch = None

    def slate(self, rows: int, longest: int) -> DecodeBatch:
        """Buffers on the device for passes that make one token a row, for sequences that lie
        anywhere and get no longer than `longest` tokens."""
        scratch, row = self._keeper.scratch(), self._keeper.layout.row_tokens
        return DecodeBatch(rows, longest, views=self._views, row_tokens=row, scratch=scratch)

    @contextmanager
    def showing(self, slate: DecodeBatch) -> Iterator[None]:
        """Let the model see the sequences that the slate was filled with as its rows."""
        self._check_idle("showing")
        self._batch = slate
        try:
            yield
        finally:
            self._batch = None

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, nothing but the caller makes or maps pages: the background thread waits."""
        return self._keeper.quiet()

    def arrange(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The same sequences in the order of their slots: the cheapest order for `rows`."""
        return sorted(sequences, key=lambda s: self._keeper.slot_of(s).index)

    def advance(self, kept: Iterable[tuple[Sequence, int]]) -> None:
        """Say how many of the tokens written stay, per sequence."""
        self._keeper.advance(kept)

    def preempt(self, sequence: Sequence) -> int:
        """Move a sequence to host memory; its slot and pages are free for others. Returns the bytes
        moved."""
        self._check_idle("preempt")
        return preempt(self._keeper, sequence)

    def restore(self, sequence: Sequence) -> None:
        """Bring a preempted sequence back. Raises CacheFull or NoSlot, and it stays away."""
        self._check_idle("restore")
        restore(self._keeper, sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over. Its pages stay with the slot until someone needs them."""
        self._check_idle("finish")
        self._keeper.finish(sequence)

    @property
    def batch(self) -> Batch | DecodeBatch | None:
        """What `rows` is showing now."""
        return self._batch

    # Memory

    @property
    def budget(self) -> int:
        """Bytes of pages it may have."""
        return self._keeper.pool.total * self._keeper.layout.page_nbytes

    def resize(self, budget: str | int) -> None:
        """A new budget. What is free, kept or ahead of need goes back to the device; CacheFull if
        live sequences need more than that."""
        self._check_idle("resize")
        self._keeper.resize(parse_bytes(budget))

    @property
    def stats(self) -> Stats:
        return count(self._keeper)

    def close(self) -> None:
        """Give all memory and the address range back. Views must not be used after this."""
        if self._closed:
            return
        self._closed = True
        pool = self._keeper.pool
        whole = self._keeper.close()
        if self._own_pool:
            pool.close(lost=not whole)
            pool.space.close()

    def __enter__(self) -> VirtualCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_keeper"):
            self.close()

    # What models call

    # Compiled by others with their model, it would take the whole range for what it writes.
    @_disable_dynamo
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> Pair:
        """Write new keys and values of a layer; returns views of all of them."""
        if self._batch is not None:
            return self._batch.update(key_states, value_states, layer_idx)
        return self._layers[layer_idx].update(key_states, value_states)

    def grow_own_rows(self, count: int, end: int) -> int:
        """Let the rows that `generate` uses hold `end` tokens; returns the first row."""
        if not self._own_rows:
            self._own_rows = [self._keeper.admit(None, end) for _ in range(count)]
        if len(self._own_rows) != count:
            raise BatchError(
                f"{count} rows were given to a cache that holds {len(self._own_rows)}; `reset` it "
                f"before a new batch"
            )
        if end > self._own_rows[0].length:
            new = end - self._own_rows[0].length
            self._keeper.prepare([(row, new) for row in self._own_rows])
            with self._keeper.whole():
                self._own_first = line_up(self._keeper, self._own_rows)
            self._keeper.advance([(row, new) for row in self._own_rows])
        return self._own_first

    def reset(self) -> None:
        """Forget the rows that `generate` filled. Sequences of `admit` stay."""
        for row in self._own_rows:
            self._keeper.finish(row)
        self._own_rows = []
        for layer in self._layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self._layers:
            layer.crop(tokens_to_remove)
        for row in self._own_rows:
            self._keeper.crop(row, min(row.length, self._layers[0].get_seq_length()))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues old row `beam_idx[i]`: pages are shared, and copied when written."""
        self._branch(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._branch([i for i in range(len(self._own_rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        every = torch.arange(len(self._own_rows))
        self._branch(every[indices.cpu()].tolist())

    def _branch(self, sources: list[int]) -> None:
        self._check_idle("reorder")
        if self._own_rows and sources != list(range(len(self._own_rows))):
            self._own_rows = branch(self._keeper, self._own_rows, sources)
            with self._keeper.whole():
                self._own_first = line_up(self._keeper, self._own_rows)

    @property
    def views(self) -> RowViews:
        return self._views

    @property
    def batch_size(self) -> int:
        return len(self._batch) if self._batch is not None else len(self._own_rows) or -1

    @property
    def max_cache_len(self) -> int:
        return self._keeper.layout.max_context

    def _check_idle(self, what: str) -> None:
        if self._batch is not None:
            raise SequenceError(f"{what} inside `with cache.rows(...)`: leave the block first")
