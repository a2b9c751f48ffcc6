"""Tensors over the rows of the cache. All are views: nothing here copies cached tokens."""

from __future__ import annotations

from typing import Any

import torch

from penstock.kv.layout import Layout

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class RowViews:
    """The keys and values of each layer, as strided views of the rows' bytes."""

    def __init__(self, rows: torch.Tensor, layout: Layout) -> None:
        shape = (-1, layout.num_layers, 2, layout.heads, layout.head_dim)
        tokens = rows.view(layout.dtype).view(shape)
        # Made once: slicing a view again for every layer of every token would take the host longer
        # than the GPU takes to read it.
        self.flat: list[KeysAndValues] = [
            (tokens[:, i, 0], tokens[:, i, 1]) for i in range(layout.num_layers)
        ]
        """Per layer `[rows * row_tokens, heads, head_dim]`, for variable-length kernels."""
        self.rows: list[KeysAndValues] = [
            (_by_row(keys, layout), _by_row(values, layout)) for keys, values in self.flat
        ]
        """Per layer `[rows, heads, row_tokens, head_dim]`."""
        self._cached_rows = (0, 0)
        self._cached_views: list[KeysAndValues] = []

    def span(self, layer: int, first: int, count: int, start: int, end: int) -> KeysAndValues:
        """Return tokens `start` to `end` of `count` rows: `[count, heads, end - start, head_dim]`.

        The views of the last rows asked for are cached: usually every layer of every token asks for
        the same rows.
        """
        if self._cached_rows != (first, count):
            pairs = ((k.narrow(0, first, count), v.narrow(0, first, count)) for k, v in self.rows)
            self._cached_rows, self._cached_views = (first, count), list(pairs)
        keys, values = self._cached_views[layer]
        return keys.narrow(2, start, end - start), values.narrow(2, start, end - start)


def _by_row(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape = (-1, layout.row_tokens, layout.heads, layout.head_dim)
    return flat.view(shape).transpose(1, 2)


def flatten_rows(rows: torch.Tensor, row_tokens: int) -> torch.Tensor:
    """View `[rows, heads, tokens, head_dim]` as `[tokens of all rows, heads, head_dim]`.

    The result includes the unmapped gaps between rows. Those must not be read.
    """
    count, heads, tokens, head_dim = rows.shape
    _, head_stride, token_stride, last_stride = rows.stride()
    size = ((count - 1) * row_tokens + tokens, heads, head_dim)
    return rows.as_strided(size, (token_stride, head_stride, last_stride))


def copy_to_device(numbers: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers to the device without waiting for it.

    `torch.tensor(numbers, device=...)` copies from pageable memory, which blocks until the stream
    is empty; a copy from pinned memory does not.
    """
    on_host = torch.as_tensor(numbers, dtype=dtype)
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)
