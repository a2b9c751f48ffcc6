"""Where a token's keys and values lie. Room: hold.

A row is `[token, layer, K or V, head, head dim]`: one page serves all layers of a few tokens, so a
sequence wastes less than a page, whatever the number of layers. Rows lie behind each other, so the
keys of one layer for a batch are one strided view.
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
    """The shape of a row, in tokens and bytes. What follows from it is reckoned once: it is asked
    for every row of every token."""

    windows: tuple[int | None, ...]
    """Per layer, how many tokens it looks back on; None: all of them."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    page_nbytes: int
    max_context: int
    """The most tokens of a sequence."""

    @cached_property
    def num_layers(self) -> int:
        return len(self.windows)

    @cached_property
    def token_nbytes(self) -> int:
        """All layers of one token. A token may lie across the border of two pages."""
        return self.num_layers * 2 * self.heads * self.head_dim * self.dtype.itemsize

    @cached_property
    def row_tokens(self) -> int:
        """Tokens from one row to the next: whole tokens and whole pages, so that the rows are also
        one flat run of tokens. What lies beyond `max_context` is address space and never memory."""
        unit = self.page_nbytes // math.gcd(self.page_nbytes, self.token_nbytes)
        return round_up(self.max_context, unit)

    @cached_property
    def row_pages(self) -> int:
        return self.row_tokens * self.token_nbytes // self.page_nbytes

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the first `tokens` tokens of a row."""
        return -(-tokens * self.token_nbytes // self.page_nbytes)

    def whole_pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill to the last byte."""
        return tokens * self.token_nbytes // self.page_nbytes

    @cached_property
    def tokens_per_page(self) -> int:
        """Rounded up: growing by that many tokens takes at least one page."""
        return -(-self.page_nbytes // self.token_nbytes)


def read_layout(config: Any, *, dtype: torch.dtype, page_nbytes: int, max_context: int) -> Layout:
    """The layout for a model's config. Raises ModelError for caches of another kind."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if max_context < 1:
        raise ModelError(f"max_context must be 1 token or more, got {max_context}")
    return Layout(
        windows=windows_of(config),
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        page_nbytes=page_nbytes,
        max_context=max_context,
    )


def windows_of(config: Any) -> tuple[int | None, ...]:
    """What transformers itself would make of each layer."""
    from transformers import cache_utils

    plain: Any = cache_utils.DynamicCache(config=config)
    known = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    for i, layer in enumerate(plain.layers):
        if type(layer) not in known:
            raise ModelError(
                f"layer {i} of {config.model_type} keeps a {type(layer).__name__}, and this cache "
                f"holds keys and values only; use transformers' DynamicCache for it"
            )
    return tuple(getattr(layer, "sliding_window", None) for layer in plain.layers)
