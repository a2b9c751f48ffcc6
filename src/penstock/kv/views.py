"""Tensors over the rows. Room: hold. Views only: nothing here copies what is cached."""

from __future__ import annotations

import torch

from penstock.kv.layout import Layout

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


class RowViews:
    """Keys and values of each layer, as strided views of the rows' bytes."""

    def __init__(self, rows: torch.Tensor, layout: Layout) -> None:
        shape = (-1, layout.num_layers, 2, layout.heads, layout.head_dim)
        tokens = rows.view(layout.dtype).view(shape)
        # Made once: taking a view apart again for every layer of every token costs the host more
        # than the GPU takes to read it.
        self.flat: list[Pair] = [
            (tokens[:, i, 0], tokens[:, i, 1]) for i in range(layout.num_layers)
        ]
        """Per layer `[rows * row_tokens, heads, head dim]`: for kernels of variable length."""
        self.rows: list[Pair] = [
            (_by_row(keys, layout), _by_row(values, layout)) for keys, values in self.flat
        ]
        """Per layer `[rows, heads, row_tokens, head dim]`."""
        self._run = (0, 0)
        self._of_run: list[Pair] = []

    def span(self, layer: int, first: int, count: int, start: int, end: int) -> Pair:
        """`[count, heads, end - start, head dim]`, the rows from `first` on."""
        if self._run != (first, count):  # the same rows, as a rule, for every layer and token
            pairs = ((k.narrow(0, first, count), v.narrow(0, first, count)) for k, v in self.rows)
            self._run, self._of_run = (first, count), list(pairs)
        keys, values = self._of_run[layer]
        return keys.narrow(2, start, end - start), values.narrow(2, start, end - start)


def _by_row(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape = (-1, layout.row_tokens, layout.heads, layout.head_dim)
    return flat.view(shape).transpose(1, 2)


def flat_view(rows: torch.Tensor, per_slot: int) -> torch.Tensor:
    """[rows, heads, tokens, head size] as [tokens of all rows, heads, head size], gaps between rows
    included: those are never read."""
    count, heads, tokens, head = rows.shape
    _, between, token, last = rows.stride()
    size = ((count - 1) * per_slot + tokens, heads, head)
    return rows.as_strided(size, (token, between, last))
