"""Choose the context and the batch for the data, where the user did not set them."""

from __future__ import annotations

import math

from penstock.data import Packed, TokenDataset
from penstock.settings import DEFAULT_BATCH, DEFAULT_CONTEXT
from penstock.units import round_up

STEPS_PER_EPOCH = 50
"""Number of steps per epoch that a chosen batch aims for. With fewer steps, warmup and decay leave
little of the learning rate, and AdamW's moments average over little data."""

TOKENS_PER_STEP = DEFAULT_CONTEXT * DEFAULT_BATCH
"""Maximum number of tokens per step of a chosen batch."""

LEAST_TEXT = 512
"""Number of tokens of a plain text that a chosen context keeps together, if the text has them."""

CONTEXT_GRAIN = 64
"""A chosen context is a multiple of this, unless it is the model's limit."""


def choose_context(
    dataset: TokenDataset, *, max_context: int | None, batch: int | None, one_per_row: bool
) -> int:
    """Return a context that fits every document with a prompt, up to the model's limit.

    Plain texts are split, so they need less. If documents share rows, the context is also long
    enough for `TOKENS_PER_STEP`, as far as an epoch still has `STEPS_PER_EPOCH` steps.

    Args:
        dataset: The data.
        max_context: Number of positions of the model; None if it has no limit.
        batch: The batch, if it is given.
        one_per_row: Whether every row has only one document.
    """
    lengths, texts = dataset.lengths, dataset.plain_texts
    prompted, text = (int(lengths[side].max(initial=0)) for side in (~texts, texts))
    if one_per_row:  # a longer row would only have more padding
        context = max(prompted, min(DEFAULT_CONTEXT, text))
    else:
        per_row = math.ceil(dataset.tokens / (STEPS_PER_EPOCH * (batch or 1)))
        context = max(prompted, min(LEAST_TEXT, text), min(DEFAULT_CONTEXT, per_row))
    context = round_up(context, CONTEXT_GRAIN)
    return context if max_context is None else min(context, max_context)


def choose_batch(packed: Packed) -> int:
    """Return the batch with which an epoch has enough steps."""
    most = max(1, TOKENS_PER_STEP // packed.context)
    return min(most, max(1, len(packed) // STEPS_PER_EPOCH))
