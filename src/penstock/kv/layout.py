"""The memory layout of keys and values.

A row of the cache is `[token, layer, K or V, head, head dim]`: one page holds all layers of a few
tokens, so a sequence wastes less than a page, however many layers the model has. Rows follow each
other in address space, so the keys of one layer for a batch are one strided view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from penstock.kv.errors import ModelError
from penstock.units import round_up


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape of a row, in tokens and bytes.

    Derived numbers are cached, because they are read for every row of every token.
    """

    windows: tuple[int | None, ...]
    """Sliding window of each layer, in tokens; None means that a query sees all tokens."""

    heads: int
    """Number of key and value heads."""
    head_dim: int
    dtype: torch.dtype
    page_nbytes: int
    max_context: int
    """Maximum number of tokens in a sequence."""

    @cached_property
    def num_layers(self) -> int:
        return len(self.windows)

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers. A token may straddle two pages."""
        return self.num_layers * 2 * self.heads * self.head_dim * self.dtype.itemsize

    @cached_property
    def row_tokens(self) -> int:
        """Number of tokens from one row to the next.

        A whole number of tokens and of pages, so that the rows are also one flat run of tokens.
        Tokens beyond `max_context` are address space that never gets memory.
        """
        unit = self.page_nbytes // math.gcd(self.page_nbytes, self.token_nbytes)
        return round_up(self.max_context, unit)

    @cached_property
    def row_pages(self) -> int:
        return self.row_tokens * self.token_nbytes // self.page_nbytes

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that the first `tokens` tokens of a row need."""
        return -(-tokens * self.token_nbytes // self.page_nbytes)

    def whole_pages(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens fill completely."""
        return tokens * self.token_nbytes // self.page_nbytes

    @cached_property
    def tokens_per_page(self) -> int:
        """Tokens per page, rounded up: growing by this many tokens needs at least one page."""
        return -(-self.page_nbytes // self.token_nbytes)


def read_layout(config: Any, *, dtype: torch.dtype, page_nbytes: int, max_context: int) -> Layout:
    """Derive the layout from a model's config. Raises ModelError for other kinds of caches."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if max_context < 1:
        raise ModelError(f"max_context must be 1 token or more, got {max_context}")
    return Layout(
        windows=layer_windows(config),
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        page_nbytes=page_nbytes,
        max_context=max_context,
    )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window, as transformers' own cache reads it from the config."""
    from transformers import cache_utils

    dynamic: Any = cache_utils.DynamicCache(config=config)
    supported = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    for i, layer in enumerate(dynamic.layers):
        if type(layer) not in supported:
            raise ModelError(
                f"layer {i} of {config.model_type} caches a {type(layer).__name__}, but this cache "
                f"holds only keys and values; use transformers' DynamicCache for this model"
            )
    return tuple(getattr(layer, "sliding_window", None) for layer in dynamic.layers)
