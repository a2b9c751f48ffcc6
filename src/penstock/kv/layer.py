"""One layer of the cache, as transformers wants to see it. Room: hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from penstock.kv.errors import ModelError, SequenceError
from penstock.kv.views import Pair

if TYPE_CHECKING:
    from penstock.kv.cache import VirtualCache


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
