"""Compute the memory that a KV cache wastes, for three layouts.

The figures are computed from the sizes of real models, and checked: Penstock's cache maps exactly
the computed number of pages for such a sequence, in host memory with pages of a GPU's size.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

from penstock.units import MiB, format_bytes

PAGE = 2 * MiB
LENGTHS = (100, 1001, 8003, 32007)
"""Sequence lengths. They are not multiples of 16, as real ones are not."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's cache, with two bytes per number."""

    name: str
    layers: int
    heads: int
    dim: int

    @property
    def token(self) -> int:
        return self.layers * 2 * self.heads * self.dim * 2


SHAPES = (
    Shape("Llama-3.1-8B", 32, 8, 128),
    Shape("Qwen2.5-7B", 28, 4, 128),
    Shape("Gemma-2-9B", 42, 8, 256),
)


def ours(shape: Shape, tokens: int) -> int:
    """Return the bytes of Penstock's layout: a page contains all layers."""
    return -(-tokens * shape.token // PAGE) * PAGE


def per_layer(shape: Shape, tokens: int) -> int:
    """Return the bytes with separate pages for the keys and for the values of every layer."""
    nbytes = tokens * shape.heads * shape.dim * 2
    return -(-nbytes // PAGE) * PAGE * 2 * shape.layers


def paged(shape: Shape, tokens: int) -> int:
    """Return the bytes with blocks of 16 tokens in every layer, as paged kernels use them."""
    return -(-tokens // 16) * 16 * shape.token


def measured(shape: Shape, tokens: int) -> int:
    """Return the bytes of the pages that a cache in host memory maps for one sequence."""
    import torch
    from transformers import LlamaConfig

    from penstock.kv import VirtualCache

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        num_key_value_heads=shape.heads,
        num_attention_heads=shape.heads,
        head_dim=shape.dim,
    )
    with VirtualCache(
        config,
        max_batch=1,
        max_context=tokens,
        budget=ours(shape, tokens) + 2 * PAGE,
        device="cpu",
        dtype=torch.bfloat16,
        page_nbytes=PAGE,
    ) as cache:
        sequence = cache.admit()
        cache.prepare([(sequence, tokens)])
        cache.advance([(sequence, tokens)])
        return cache.stats.live * PAGE


def rows(check_below: int) -> list[dict[str, object]]:
    table = []
    for shape in SHAPES:
        for tokens in LENGTHS:
            need = tokens * shape.token
            waste = {f.__name__: f(shape, tokens) - need for f in (ours, per_layer, paged)}
            checked = ours(shape, tokens) <= check_below
            if checked and measured(shape, tokens) != ours(shape, tokens):
                sys.exit(f"{shape.name}, {tokens} tokens: the cache maps another number of pages")
            table.append(
                {"model": shape.name, "tokens": tokens, "need": need, **waste, "checked": checked}
            )
    return table


def show(row: dict[str, object]) -> str:
    def cell(name: str) -> str:
        nbytes, need = int(str(row[name])), int(str(row["need"]))
        return f"{format_bytes(nbytes)} ({100 * nbytes / need:.1f} %)"

    cells = [str(row["model"]), f"{row['tokens']}", format_bytes(int(str(row["need"])))]
    cells += [cell(name) for name in ("ours", "per_layer", "paged")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check-below", type=int, default=1200, help="check rows up to this many MiB"
    )
    args = parser.parse_args()
    table = rows(args.check_below * MiB)
    if args.json:
        print(json.dumps(table, indent=2))
        return
    print("| model | tokens | need | waste, this layout | per-layer ranges | blocks of 16 |")
    print("|---|---|---|---|---|---|")
    for row in table:
        print(show(row))
    checked = sum(bool(row["checked"]) for row in table)
    print(f"\n{checked} of {len(table)} rows were checked against a cache.")


if __name__ == "__main__":
    main()
