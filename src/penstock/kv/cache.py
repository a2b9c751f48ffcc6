"""The cache that models and generators use. Room: hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from transformers.cache_utils import Cache

from penstock.kv import moving, saving, stats
from penstock.kv.batch import Batch
from penstock.kv.errors import BatchError, BudgetError, SequenceError
from penstock.kv.keeper import Keeper
from penstock.kv.layer import VirtualLayer
from penstock.kv.layout import read_layout
from penstock.kv.pool import PagePool
from penstock.kv.slate import Slate
from penstock.kv.slots import Sequence
from penstock.kv.space import open_space
from penstock.kv.views import Pair, RowViews
from penstock.units import parse_bytes


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
            self._keeper = Keeper(pool or PagePool(space, nbytes), layout, max_batch)
        except BaseException:
            if self._own_pool:
                space.close()
            raise
        self._views = RowViews(self._keeper.table.rows(), layout)
        self._batch: Batch | Slate | None = None
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
            first = moving.line_up(self._keeper, sequences)
            if padded and len(sequences) > 1:
                moving.cover_gaps(self._keeper, sequences)
            self._batch = batch = Batch(self._views, self._keeper.layout, first, sequences)
        try:
            yield batch
        finally:
            self._batch = None

    def slate(self, rows: int, longest: int) -> Slate:
        """Buffers on the device for passes that make one token a row, for sequences that lie
        anywhere and get no longer than `longest` tokens."""
        scratch, row = self._keeper.scratch(), self._keeper.layout.row_tokens
        return Slate(rows, longest, views=self._views, row_tokens=row, scratch=scratch)

    @contextmanager
    def showing(self, slate: Slate) -> Iterator[None]:
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
        return saving.preempt(self._keeper, sequence)

    def restore(self, sequence: Sequence) -> None:
        """Bring a preempted sequence back. Raises CacheFull or NoSlot, and it stays away."""
        self._check_idle("restore")
        saving.restore(self._keeper, sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over. Its pages stay with the slot until someone needs them."""
        self._check_idle("finish")
        self._keeper.finish(sequence)

    @property
    def batch(self) -> Batch | Slate | None:
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
    def stats(self) -> stats.Stats:
        return stats.count(self._keeper)

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
                self._own_first = moving.line_up(self._keeper, self._own_rows)
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
            self._own_rows = moving.branch(self._keeper, self._own_rows, sources)
            with self._keeper.whole():
                self._own_first = moving.line_up(self._keeper, self._own_rows)

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
