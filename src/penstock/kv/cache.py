"""The KV cache that models and generators use.

`VirtualCache` is a transformers cache whose keys and values are in one address range that gets
memory as sequences grow. `Batch` is the view of it that a model gets in one call: some sequences as
adjacent rows. `VirtualLayer` is one layer of it as transformers sees it.
"""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Iterable, Iterator
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
    count_pages,
    cover_padding,
    make_adjacent,
    preempt,
    restore,
)
from penstock.kv.slots import Sequence
from penstock.kv.views import KeysAndValues, RowViews, copy_to_device
from penstock.machine.limits import host_memory
from penstock.machine.sysfs import System
from penstock.units import GiB, parse_memory

AUTO_RESERVE = GiB
"""Memory that an `auto` budget leaves free, in addition to `AUTO_SHARE`."""

AUTO_SHARE = 0.05
"""Fraction of the free memory that an `auto` budget leaves free."""


def free_for_cache(device: torch.device) -> int:
    """Return the memory that a cache may take by default: what is free, less a reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator holds without using it is for the activations of the model.
    else:
        free = host_memory(System()).free
    return max(0, int(free * (1 - AUTO_SHARE)) - AUTO_RESERVE)


class VirtualCache(Cache):
    """Keys and values in one address range that gets memory as sequences grow.

    Pass it to `generate(..., past_key_values=cache)` like any transformers cache; it then manages
    its rows itself. For continuous batching use `admit`, `prepare`, `rows`, `advance` and `finish`.

    Views that the cache returned must not be used after `close`, nor after a later call that moves
    rows.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_batch: int,
        max_context: int,
        budget: str | int = "auto",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        page_nbytes: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        """Reserve the address range; memory is allocated later.

        Args:
            config: The model's config.
            max_batch: Maximum number of sequences. Costs address space only.
            max_context: Maximum number of tokens per sequence. Costs address space only.
            budget: Maximum amount of memory, such as `"8GiB"`, or a number of bytes. By default,
                what is free on the device now, less a reserve for the model's activations.
            device: Device of the cache; by default a GPU if there is one.
            dtype: Type of keys and values; by default that of the config.
            page_nbytes: Page size; by default the device's own.
            pool: Pool to allocate pages from, within that pool's budget.
        """
        on_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._own_pool = pool is None
        space = pool.space if pool else open_space(on_device, page_nbytes)
        try:
            layout = read_layout(
                config,
                dtype=dtype or getattr(config, "dtype", None) or torch.get_default_dtype(),
                page_nbytes=space.page_nbytes,
                max_context=max_context,
            )
            nbytes = free_for_cache(on_device) if budget == "auto" else parse_memory(budget)
            if max_batch < 1 or nbytes < max_batch * space.page_nbytes:
                raise BudgetError(budget=nbytes, sequences=max_batch, page=space.page_nbytes)
            self._table = SequenceTable(pool or PagePool(space, nbytes), layout, max_batch)
        except BaseException:
            if self._own_pool:
                space.close()
            raise
        self._views = RowViews(self._table.page_table.rows(), layout)
        self._batch: Batch | DecodeBatch | None = None
        self._own_rows: list[Sequence] = []
        self._own_first = 0
        self._closed = False
        self._layers = [VirtualLayer(self, i, w) for i, w in enumerate(layout.windows)]
        super().__init__(layers=[*self._layers])

    # Continuous batching

    def admit(self, prefix: tuple[Sequence, int] | None = None, *, expect: int = 0) -> Sequence:
        """Admit a new sequence into a free slot. Raises NoSlot if there is none.

        With `prefix`, it begins with the first tokens of another sequence, and both share the
        pages. `expect` is the number of tokens to expect, which helps to choose among slots that
        kept pages.
        """
        return self._table.admit(prefix, expect)

    def prepare(self, new: Iterable[tuple[Sequence, int]]) -> None:
        """Give each sequence memory for that many more tokens.

        All sequences get their memory or none: CacheFull leaves everything as it was. Shared pages
        that would be written are copied here.
        """
        self._check_idle("prepare")
        self._table.prepare(new)

    @contextmanager
    def rows(self, sequences: abc.Sequence[Sequence], *, padded: bool = True) -> Iterator[Batch]:
        """Show the model these sequences as its rows, in this order, inside the block.

        Adjacent sequences stay where they are; others are remapped (`arrange` returns the cheapest
        order). With `padded`, all rows can be read up to the end of the longest; kernels that get
        each row's length do not need that.
        """
        self._check_idle("rows")
        if not sequences:
            raise BatchError("a batch needs at least one sequence")
        with self._table.exclusive():
            first = make_adjacent(self._table, sequences)
            if padded and len(sequences) > 1:
                cover_padding(self._table, sequences)
            self._batch = batch = Batch(self._views, self._table.layout, first, sequences)
        try:
            yield batch
        finally:
            self._batch = None

    def make_decode_batch(self, rows: int, longest: int) -> DecodeBatch:
        """Make buffers for passes that generate one token per row.

        They serve up to `rows` sequences, anywhere in the cache, of at most `longest` tokens.
        """
        scratch, row = self._table.scratch(), self._table.layout.row_tokens
        return DecodeBatch(rows, longest, views=self._views, row_tokens=row, scratch=scratch)

    @contextmanager
    def decoding(self, batch: DecodeBatch) -> Iterator[None]:
        """Show the model the sequences of a decode batch as its rows inside the block."""
        self._check_idle("decoding")
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def growth_paused(self) -> AbstractContextManager[None]:
        """Keep the background thread from creating or mapping pages inside the block."""
        return self._table.growth_paused()

    def arrange(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Return the same sequences in the order of their slots: the cheapest order for `rows`."""
        return sorted(sequences, key=lambda s: self._table.slot_of(s).index)

    def advance(self, kept: Iterable[tuple[Sequence, int]]) -> None:
        """Keep that many of the tokens that were written, for each sequence."""
        self._table.advance(kept)

    def preempt(self, sequence: Sequence) -> int:
        """Move a sequence to host memory, and return the number of bytes moved.

        Its slot and its pages become available to others.
        """
        self._check_idle("preempt")
        return preempt(self._table, sequence)

    def restore(self, sequence: Sequence) -> None:
        """Bring a preempted sequence back. CacheFull and NoSlot leave it in host memory."""
        self._check_idle("restore")
        restore(self._table, sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence. Its pages stay with the slot until they are needed elsewhere."""
        self._check_idle("finish")
        self._table.finish(sequence)

    @property
    def batch(self) -> Batch | DecodeBatch | None:
        """The rows that the model sees now, inside `rows` or `decoding`."""
        return self._batch

    # Memory

    @property
    def budget(self) -> int:
        """Maximum number of bytes in pages."""
        return self._table.pool.total * self._table.layout.page_nbytes

    def resize(self, budget: str | int) -> None:
        """Set a new budget.

        Pages that are free, kept or ahead of need are returned to the device. Raises CacheFull if
        live sequences need more than the new budget.
        """
        self._check_idle("resize")
        self._table.resize(parse_memory(budget))

    @property
    def stats(self) -> Stats:
        """The pages of the cache, counted by what they are used for."""
        return count_pages(self._table)

    def close(self) -> None:
        """Release all memory and the address range. Views must not be used after this."""
        if self._closed:
            return
        self._closed = True
        pool = self._table.pool
        intact = self._table.close()
        if self._own_pool:
            pool.close(lost=not intact)
            pool.space.close()

    def __enter__(self) -> VirtualCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_table"):
            self.close()

    # What models call

    # Kept out of code that others compile with their model: such code would treat the whole range
    # as a tensor that it writes.
    @_disable_dynamo
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> KeysAndValues:
        """Write new keys and values of a layer, and return views of all of them."""
        if self._batch is not None:
            return self._batch.update(key_states, value_states, layer_idx)
        return self._layers[layer_idx].update(key_states, value_states)

    def grow_own_rows(self, count: int, end: int) -> int:
        """Make the rows that `generate` uses hold `end` tokens, and return the first row."""
        if not self._own_rows:
            self._own_rows = [self._table.admit(None, end) for _ in range(count)]
        if len(self._own_rows) != count:
            raise BatchError(
                f"the model passed {count} rows to a cache that holds {len(self._own_rows)}; call "
                f"`reset` before a new batch"
            )
        if end > self._own_rows[0].length:
            new = end - self._own_rows[0].length
            self._table.prepare([(row, new) for row in self._own_rows])
            with self._table.exclusive():
                self._own_first = make_adjacent(self._table, self._own_rows)
            self._table.advance([(row, new) for row in self._own_rows])
        return self._own_first

    def reset(self) -> None:
        """Finish the rows that `generate` filled. Sequences from `admit` stay."""
        for row in self._own_rows:
            self._table.finish(row)
        self._own_rows = []
        for layer in self._layers:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all rows that `generate` filled; the number is negative."""
        for layer in self._layers:
            layer.crop(tokens_to_remove)
        for row in self._own_rows:
            self._table.crop(row, min(row.length, self._layers[0].get_seq_length()))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i continue old row `beam_idx[i]`. Pages are shared, and copied when written."""
        self._branch(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._branch([i for i in range(len(self._own_rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows with these indices."""
        every = torch.arange(len(self._own_rows))
        self._branch(every[indices.cpu()].tolist())

    def _branch(self, sources: list[int]) -> None:
        self._check_idle("reorder")
        if self._own_rows and sources != list(range(len(self._own_rows))):
            self._own_rows = branch(self._table, self._own_rows, sources)
            with self._table.exclusive():
                self._own_first = make_adjacent(self._table, self._own_rows)

    @property
    def views(self) -> RowViews:
        """Views of all rows of the cache."""
        return self._views

    @property
    def batch_size(self) -> int:
        return len(self._batch) if self._batch is not None else len(self._own_rows) or -1

    @property
    def max_cache_len(self) -> int:
        return self._table.layout.max_context

    def _check_idle(self, what: str) -> None:
        if self._batch is not None:
            raise SequenceError(
                f"{what} cannot be called inside `with cache.rows(...)`; leave the block first"
            )


class Batch:
    """Adjacent rows of different lengths, for one call of the model.

    It is valid inside the `with cache.rows(...)` block that returned it.
    """

    def __init__(
        self, views: RowViews, layout: Layout, first: int, sequences: abc.Sequence[Sequence]
    ) -> None:
        self._views, self._layout = views, layout
        self.first = first
        """The first of its rows in the cache."""
        self.sequences = tuple(sequences)
        self._past = [sequence.length for sequence in sequences]
        self._room = [sequence.room for sequence in sequences]
        self.longest = max(self._past)
        """Number of tokens in the longest row before this call of the model."""
        self._equal = min(self._past) == self.longest
        self._min_room, self._max_room = min(self._room), max(self._room)
        self._targets: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def _device(self) -> torch.device:
        return self._views.flat[0][0].device

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """Number of tokens in each row before this call of the model."""
        return copy_to_device(self._past, torch.int32, self._device)

    def length_after(self, new: int) -> int:
        """Return the length of the longest row after a call with `new` tokens per row."""
        if new <= self._min_room:  # the usual case, decided quickly: every layer asks
            return self.longest + new
        ends = (p + min(new, room) for p, room in zip(self._past, self._room, strict=True))
        return max(ends)

    def padded(self, layer: int, new: int) -> KeysAndValues:
        """Return keys and values as `[rows, heads, longest, head dim]`.

        Short rows are followed by zeros, or by what the same sequence once wrote there.
        """
        return self._views.span(layer, self.first, len(self), 0, self.length_after(new))

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> KeysAndValues:
        """Write `[rows, heads, new, head dim]`, each row at its own length.

        Returns everything in the rows, as `padded` does. A row that was prepared for fewer tokens
        gets only its first ones: the others are padding.
        """
        new = self._check(keys)
        every = self.padded(layer, new)
        if not (self._equal and new <= self._min_room):
            self._scatter(keys, values, layer)
            return every
        past = self.longest
        for whole, source in zip(every, (keys, values), strict=True):
            target = whole.narrow(2, past, new) if past else whole
            target.copy_(source.detach())
        return every

    def _scatter(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        new = keys.shape[2]
        targets, chosen = self._find_targets(new)
        for target, source in zip(self._views.flat[layer], (keys, values), strict=True):
            tokens = source.detach().transpose(1, 2).flatten(0, 1)
            target.index_copy_(0, targets, tokens if chosen is None else tokens[chosen])

    def _find_targets(self, new: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return where in the flat view tokens go, and which tokens; the same for every layer."""
        if new not in self._targets:
            targets: list[int] = []
            chosen: list[int] = []
            row_tokens = self._layout.row_tokens
            for i, (past, room) in enumerate(zip(self._past, self._room, strict=True)):
                start, kept = (self.first + i) * row_tokens + past, min(new, room)
                targets.extend(range(start, start + kept))
                chosen.extend(range(i * new, i * new + kept))
            device = self._device
            all_tokens = len(chosen) == new * len(self)
            self._targets[new] = (
                copy_to_device(targets, torch.int64, device),
                None if all_tokens else copy_to_device(chosen, torch.int64, device),
            )
        return self._targets[new]

    def _check(self, keys: torch.Tensor) -> int:
        count, heads, new, dim = keys.shape
        rows, own_heads, own_dim = len(self), self._layout.heads, self._layout.head_dim
        if (count, heads, dim) != (rows, own_heads, own_dim):
            raise BatchError(
                f"the model passed keys of {count} rows with {heads} heads of size {dim} to a "
                f"batch of {rows} rows with {own_heads} heads of size {own_dim}; call the model "
                f"with as many rows as were passed to `rows`"
            )
        if new > self._max_room:
            raise BatchError(
                f"the model was called with {new} tokens per row, but the batch is prepared for "
                f"{self._max_room}; call prepare first"
            )
        return new


class VirtualLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the cache, as transformers sees it.

    It counts the layer's tokens and returns views; the bytes are the cache's. A layer with a
    sliding window keeps all tokens, because the layers share pages, and shows the model only the
    tokens inside the window. No gradient flows through cached tokens.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: VirtualCache, index: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index, self._length = cache, index, 0
        self.is_sliding = window is not None
        self.sliding_window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check once that the model is the one for which the cache was created."""
        keys, values = self._cache.views.rows[self._index]
        for name, new, own in (("keys", key_states, keys), ("values", value_states, values)):
            if new.dtype != own.dtype or new.device != own.device:
                raise ModelError(
                    f"the model computes {name} in {new.dtype} on {new.device}, but the cache "
                    f"holds {own.dtype} on {own.device}; create it with the model's dtype and "
                    f"device"
                )
            if (new.shape[1], new.shape[3]) != (own.shape[1], own.shape[3]):
                raise ModelError(
                    f"the model computes {name} of {new.shape[1]} heads of size {new.shape[3]}, "
                    f"but the cache holds {own.shape[1]} heads of size {own.shape[3]}; create it "
                    f"with this model's config"
                )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> KeysAndValues:
        """Write new keys and values, and return views of all that the window reaches."""
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
        return views.span(self._index, first, count, self._first_visible(past), end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        batch = self._cache.batch
        if batch is not None:
            return batch.length_after(query_length), 0
        start = self._first_visible(self._length)
        return self._length + query_length - start, start

    def get_seq_length(self) -> int:
        batch = self._cache.batch
        return self._length if batch is None else batch.longest

    def get_max_length(self) -> int:
        return self._cache.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; transformers passes their number as a negative one."""
        if tokens_to_remove > 0 or -tokens_to_remove > self._length:
            raise SequenceError(
                f"crop takes a negative number of tokens to remove, at most {self._length} of "
                f"them, got {tokens_to_remove}"
            )
        self._length += tokens_to_remove

    def reset(self) -> None:
        self._length = 0

    def _first_visible(self, past: int) -> int:
        """Return the first token that a query after `past` tokens can see."""
        if self.sliding_window is None:
            return 0
        return max(past - self.sliding_window + 1, 0)
