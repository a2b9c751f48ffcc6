"""Small caches for tests, and what is in them."""

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
"""192 bytes a token in bfloat16: pages end in the middle of one."""


def config(**other: Any) -> Any:
    from transformers import LlamaConfig

    shape = {"hidden_size": 24, "num_attention_heads": 1, "num_key_value_heads": HEADS}
    return LlamaConfig(num_hidden_layers=LAYERS, head_dim=DIM, **(shape | other))


_CONFIG = None


def cache(
    space: Space | None = None, *, slots: int = 4, pages: int = 32, context: int = 120
) -> VirtualCache:
    """A cache over a space of its own, in pages of that space."""
    global _CONFIG  # noqa: PLW0603  # transformers takes 20 ms to make one
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


def close(made: VirtualCache) -> None:
    """The cache, and the pool and space it was given."""
    pool = made._table.pool
    made.close()
    assert pool.used == 0
    pool.close()
    pool.space.close()


def write(made: VirtualCache, sequences: list[Sequence], tokens: torch.Tensor) -> None:
    """`tokens` is `[rows, new, layers, 2, heads, dim]`, as int16 bits."""
    with made.rows(sequences):
        for layer in range(LAYERS):
            parts = tokens[:, :, layer].view(torch.bfloat16).to(made.views.rows[0][0].device)
            made.update(parts[:, :, 0].transpose(1, 2), parts[:, :, 1].transpose(1, 2), layer)


def grow(made: VirtualCache, sequence: Sequence, tokens: torch.Tensor) -> None:
    made.prepare([(sequence, len(tokens))])
    write(made, [sequence], tokens[None])
    made.advance([(sequence, len(tokens))])


def read(made: VirtualCache, sequence: Sequence) -> torch.Tensor:
    """All tokens of a sequence `[tokens, layers, 2, heads, dim]`, as int16 bits."""
    assert sequence.slot is not None
    row = slice(sequence.slot, sequence.slot + 1)
    layers = [
        torch.stack([side[row, :, : sequence.length] for side in pair]) for pair in made.views.rows
    ]
    stacked = torch.stack(layers)[:, :, 0]  # [layers, 2, heads, tokens, dim]
    return stacked.permute(3, 0, 1, 2, 4).contiguous().view(torch.int16).cpu()


_COUNT = torch.Generator().manual_seed(0)


def some(count: int) -> torch.Tensor:
    """New tokens, unlike all others, none of them NaN."""
    shape = (count, LAYERS, 2, HEADS, DIM)
    return torch.randint(0, 0x7F00, shape, dtype=torch.int16, generator=_COUNT)


def tail(made: VirtualCache, sequence: Sequence) -> torch.Tensor:
    """The bytes that are mapped behind a sequence's tokens."""
    slot = made._table.slot_of(sequence)
    mapped = len(slot.pages) * made._table.layout.page_nbytes
    part = made._table.page_table.part(slot, mapped)
    return part[sequence.length * made._table.layout.token_nbytes :].cpu()


def files() -> list[str]:
    """Open files that hold pages of host memory."""
    found = Path("/proc/self/fd").iterdir()
    return [str(p) for p in found if p.is_symlink() and "penstock-kv" in os.readlink(p)]
