"""Small caches for tests, and functions that fill and read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from penstock.kv.address_space import HostSpace, Space
from penstock.kv.cache import VirtualCache
from penstock.kv.page_pool import PagePool
from penstock.kv.slots import Sequence

LAYERS, HEADS, DIM = 2, 1, 24
"""192 bytes per token in bfloat16, so that pages end in the middle of a token."""


def config(**other: Any) -> Any:
    from transformers import LlamaConfig

    shape = {"hidden_size": 24, "num_attention_heads": 1, "num_key_value_heads": HEADS}
    return LlamaConfig(num_hidden_layers=LAYERS, head_dim=DIM, **(shape | other))


_CONFIG = None


def make_cache(
    space: Space | None = None, *, slots: int = 4, pages: int = 32, context: int = 120
) -> VirtualCache:
    """Create a cache with a pool of its own over `space`, by default 4 KiB pages of host memory."""
    global _CONFIG  # noqa: PLW0603  # transformers takes 20 ms to create one
    _CONFIG = _CONFIG or config()
    space = space or HostSpace(4096)
    return VirtualCache(
        _CONFIG,
        max_batch=slots,
        max_context=context,
        budget=pages * space.page_nbytes,
        dtype=torch.bfloat16,
        pool=PagePool(space, pages * space.page_nbytes),
    )


def close(cache: VirtualCache) -> None:
    """Close a cache, its pool and its space, and check that it released every page."""
    pool = cache._table.pool
    cache.close()
    assert pool.used == 0
    pool.close()
    pool.space.close()


def write(cache: VirtualCache, sequences: list[Sequence], tokens: torch.Tensor) -> None:
    """Write tokens `[rows, new, layers, 2, heads, dim]`, given as int16 bits, as a model would."""
    with cache.rows(sequences):
        for layer in range(LAYERS):
            parts = tokens[:, :, layer].view(torch.bfloat16).to(cache.views.rows[0][0].device)
            cache.update(parts[:, :, 0].transpose(1, 2), parts[:, :, 1].transpose(1, 2), layer)


def grow(cache: VirtualCache, sequence: Sequence, tokens: torch.Tensor) -> None:
    """Append tokens to a sequence."""
    cache.prepare([(sequence, len(tokens))])
    write(cache, [sequence], tokens[None])
    cache.advance([(sequence, len(tokens))])


def read(cache: VirtualCache, sequence: Sequence) -> torch.Tensor:
    """Read all tokens of a sequence, `[tokens, layers, 2, heads, dim]`, as int16 bits."""
    assert sequence.slot is not None
    row = slice(sequence.slot, sequence.slot + 1)
    layers = [
        torch.stack([side[row, :, : sequence.length] for side in pair]) for pair in cache.views.rows
    ]
    stacked = torch.stack(layers)[:, :, 0]  # [layers, 2, heads, tokens, dim]
    return stacked.permute(3, 0, 1, 2, 4).contiguous().view(torch.int16).cpu()


_GENERATOR = torch.Generator().manual_seed(0)


def random_tokens(count: int) -> torch.Tensor:
    """Draw new tokens without NaN."""
    shape = (count, LAYERS, 2, HEADS, DIM)
    return torch.randint(0, 0x7F00, shape, dtype=torch.int16, generator=_GENERATOR)


def bytes_after(cache: VirtualCache, sequence: Sequence) -> torch.Tensor:
    """Return the mapped bytes after a sequence's tokens."""
    slot = cache._table.slot_of(sequence)
    mapped = len(slot.pages) * cache._table.layout.page_nbytes
    part = cache._table.page_table.part(slot, mapped)
    return part[sequence.length * cache._table.layout.token_nbytes :].cpu()


def open_page_files() -> list[str]:
    """Return the open files that hold pages of host memory."""
    descriptors = Path("/proc/self/fd").iterdir()
    return [str(p) for p in descriptors if p.is_symlink() and "penstock-kv" in os.readlink(p)]
