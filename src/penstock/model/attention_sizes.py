"""Sizes of what the attention kernels return, without importing torch."""

from __future__ import annotations

PADDING = 128
"""Arrays of one number per token are padded to a multiple of this, as in `attention_kernels`."""


def padded_tokens(tokens: int) -> int:
    """Return the length of arrays of one number per token."""
    return -(-tokens // PADDING) * PADDING


def attention_result_nbytes(*, tokens: int, query_width: int, heads: int, element: int) -> int:
    """Return the bytes of attention's output and of its log-sum-exps, without a gap in between.

    The output has `query_width` numbers of `element` bytes per token.
    """
    return tokens * query_width * element + 4 * heads * padded_tokens(tokens)
