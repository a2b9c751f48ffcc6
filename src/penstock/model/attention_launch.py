"""Launch the attention kernels: which tiles they use on which GPU, and the memory they need.

The tiles follow from the head size, the data type's size and the GPU's architecture alone. They are
never chosen by timing, because a different tile adds in a different order and gives other bits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from penstock.model.attention_sizes import PADDING, padded_tokens

Kernel = Literal["forward", "query_gradient", "key_gradient", "value_gradient"]
"""Where there are no tiles for `value_gradient`, `key_gradient` computes both gradients at once:
one matrix product less, but twice as many registers."""


class Tiles(NamedTuple):
    """The shape in which a kernel computes."""

    queries: int
    """Number of queries per tile."""
    keys: int
    """Number of keys per tile."""
    warps: int
    stages: int
    """Number of tiles of the inner loop that are in shared memory at a time."""
    copy_engine: bool = False
    """Whether the GPU's copy engine loads tiles. It needs a head size that is a power of two."""
    in_registers: bool = False
    """Whether the forward and the gradient of queries keep queries in registers."""


_LARGE: Mapping[tuple[Kernel, int], Tiles] = {
    ("forward", 64): Tiles(64, 64, 4, 3),
    ("forward", 128): Tiles(64, 64, 4, 3, True),
    ("forward", 256): Tiles(128, 64, 8, 2),
    ("query_gradient", 64): Tiles(128, 64, 8, 3),
    ("query_gradient", 128): Tiles(64, 64, 4, 2, True),
    ("query_gradient", 256): Tiles(64, 64, 4, 2),
    ("key_gradient", 64): Tiles(64, 64, 4, 3, True),
    ("key_gradient", 128): Tiles(64, 64, 4, 2, True),
    ("key_gradient", 256): Tiles(64, 64, 4, 2, True),
    ("value_gradient", 256): Tiles(64, 64, 4, 2, True),
}
"""For GPUs with 227 KiB of shared memory per program and a copy engine, by the head size that tiles
are padded to. They were the fastest of those that `bench/bench_attention.py --tune` measures on an
H200."""

_SMALL: Mapping[tuple[Kernel, int], Tiles] = {
    ("forward", 64): Tiles(128, 64, 4, 2),
    ("forward", 128): Tiles(64, 64, 4, 2),
    ("forward", 256): Tiles(64, 32, 4, 1),
    ("query_gradient", 64): Tiles(64, 64, 4, 2),
    ("query_gradient", 128): Tiles(64, 32, 4, 2),
    ("query_gradient", 256): Tiles(32, 32, 4, 1),
    ("key_gradient", 64): Tiles(32, 64, 4, 2),
    ("key_gradient", 128): Tiles(32, 64, 4, 2),
    ("key_gradient", 256): Tiles(32, 32, 4, 1),
    ("value_gradient", 256): Tiles(32, 32, 4, 1),
}
"""For all other GPUs: they have at least 99 KiB of shared memory per program."""

_FP32: Mapping[tuple[Kernel, int], Tiles] = {
    ("forward", 64): Tiles(32, 32, 4, 2),
    ("forward", 128): Tiles(32, 32, 4, 1),
    ("forward", 256): Tiles(16, 16, 4, 1),
    ("query_gradient", 64): Tiles(32, 32, 4, 2),
    ("query_gradient", 128): Tiles(32, 32, 4, 1),
    ("query_gradient", 256): Tiles(16, 16, 4, 1),
    ("key_gradient", 64): Tiles(32, 32, 4, 2),
    ("key_gradient", 128): Tiles(32, 32, 4, 1),
    ("key_gradient", 256): Tiles(16, 16, 4, 1),
}
"""For fp32 on any GPU: elements take twice the bytes, and products use registers instead of tensor
cores. The kernels need up to 68 KiB of shared memory. No measurement chose these tiles."""

_LARGE_ARCHITECTURES = (9, 10)
"""Major compute capabilities of Hopper and of Blackwell's data center GPUs."""

NEVER = 2**30
"""First visible key of a token that is padding."""


def document_spans(bounds: Sequence[int]) -> torch.Tensor:
    """Return the first and last token of each token's document, and the order of programs.

    `bounds` are the positions where documents begin, followed by the number of tokens. The result
    is int32, `[2, padded tokens + blocks]`. In both rows, an order of the blocks of PADDING tokens
    follows the padded tokens: in the first row that of queries, in the second that of keys.
    """
    marks = torch.tensor(bounds, dtype=torch.int32)
    spans = torch.stack([marks[:-1], marks[1:] - 1]).repeat_interleave(marks.diff(), dim=1)
    padding = spans.new_full((2, padded_tokens(bounds[-1]) - bounds[-1]), NEVER)
    return torch.cat([spans, padding, _order_of_blocks(spans)], dim=1)


def _order_of_blocks(spans: torch.Tensor) -> torch.Tensor:
    """Return the blocks of queries by the keys that they see, those of keys by their queries.

    Blocks with the most work come first. In the order of tokens, the long blocks of the last row
    would start late, and most multiprocessors would wait for them at the end. A window is not
    considered: with one, blocks differ little.
    """
    tokens = spans.shape[1]
    lows = torch.arange(0, tokens, PADDING)
    highs = (lows + PADDING - 1).clamp(max=tokens - 1)
    work = torch.stack([highs - spans[0, lows], spans[1, highs] - lows])
    return work.argsort(dim=1, descending=True, stable=True).to(torch.int32)


def attention_workspace_nbytes(*, tokens: int, heads: int) -> int:
    """Return the bytes that the backward allocates in addition to its results: the deltas."""
    return 4 * heads * padded_tokens(tokens)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("penstock.model.attention_kernels")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def choose_tiles(
    kernel: Kernel, head_size: int, capability: tuple[int, int], element_size: int
) -> Tiles | None:
    """Return the tiles of a kernel, None if another kernel computes its result as well."""
    table = _LARGE if capability[0] in _LARGE_ARCHITECTURES else _SMALL
    table = _FP32 if element_size == 4 else table
    wide = padded_head_size(head_size)
    tiles = table.get((kernel, max(64, wide)))
    # The copy engine loads whole rows of a tile, and would read beyond a head that is not as wide.
    return tiles if tiles is None or wide == head_size else tiles._replace(copy_engine=False)


def padded_head_size(size: int) -> int:
    """Return the width of a tile: a power of two, and no less than a matrix instruction's."""
    return max(16, 1 << (size - 1).bit_length())


class Layout(NamedTuple):
    """Which keys each query sees, and how scores are made."""

    spans: torch.Tensor
    """What `document_spans` returns: where documents are, and the order of programs."""
    scale: float
    window: int
    """Number of keys that a query sees at most; 0: all."""
    cap: float
    """Bound of the scores; 0: none."""


Choose = Callable[[Kernel, int, tuple[int, int], int], Tiles | None]
"""Chooses tiles by the kernel, the head size, the GPU's capability and the bytes of an element."""


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout,
    choose: Choose = choose_tiles,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output and each query's log-sum-exp, `[heads, padded tokens]`."""
    tokens, heads, _ = query.shape
    out = torch.empty_like(query)
    sums = torch.empty((heads, padded_tokens(tokens)), dtype=torch.float32, device=query.device)
    tiles = _tiles("forward", query, choose)
    assert tiles is not None
    read = _describe(tiles, query=query, key=key, value=value)
    _launch(
        "forward", (_programs(tokens, tiles.queries), heads), query, key, layout, tiles,
        (read["query"], read["key"], read["value"], out, sums, layout.spans[0]),
        IN_REGISTERS=tiles.in_registers,
    )  # fmt: skip
    return out, sums


def backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, layout: Layout, choose: Choose = choose_tiles,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    dq, deltas = query_gradient(grad, query, key, value, out, log_sums, layout, choose)
    return dq, *key_gradients(grad, query, key, value, log_sums, deltas, layout, choose)


def query_gradient(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, layout: Layout, choose: Choose = choose_tiles,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradient of queries and the deltas."""
    tokens, heads, _ = query.shape
    dq, deltas = torch.empty_like(query), torch.empty_like(log_sums)
    tiles = _tiles("query_gradient", query, choose)
    assert tiles is not None
    read = _describe(tiles, query=query, grad=grad, out=out, key=key, value=value)
    _launch(
        "query_gradient", (_programs(tokens, tiles.queries), heads), query, key, layout, tiles,
        (read["grad"], read["query"], read["key"], read["value"], read["out"], log_sums, deltas, dq,
         layout.spans[0]),
        IN_REGISTERS=tiles.in_registers,
    )  # fmt: skip
    return dq, deltas


def key_gradients(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    log_sums: torch.Tensor, deltas: torch.Tensor, layout: Layout, choose: Choose = choose_tiles,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of keys and values."""
    dk, dv = torch.empty_like(key), torch.empty_like(value)
    tensors = (grad, query, key, value, log_sums, deltas, layout, dk, dv)
    for_keys, for_values = (
        _tiles(name, query, choose) for name in ("key_gradient", "value_gradient")
    )  # fmt: skip
    assert for_keys is not None
    launch_key_gradients(*tensors, for_keys, keys=True, values=for_values is None)
    if for_values is not None:
        launch_key_gradients(*tensors, for_values, keys=False, values=True)
    return dk, dv


def launch_key_gradients(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    log_sums: torch.Tensor, deltas: torch.Tensor, layout: Layout, dk: torch.Tensor,
    dv: torch.Tensor, tiles: Tiles, *, keys: bool, values: bool,
) -> None:  # fmt: skip
    """Compute the gradient of keys, of values or of both."""
    read = _describe(
        tiles, query=query, grad=grad, key=key, value=value, sums=log_sums, deltas=deltas
    )
    arguments = (
        *(read["grad"], read["query"], read["key"], read["value"], read["sums"], read["deltas"]),
        *(dk, dv, layout.spans[0], layout.spans[1]),
    )
    grid = (_programs(key.shape[0], tiles.keys), key.shape[1])
    _launch("key_gradient", grid, query, key, layout, tiles, arguments, KEYS=keys, VALUES=values)


def _programs(tokens: int, tile: int) -> int:
    """Return the number of tiles in all blocks of PADDING tokens. Some may have no token."""
    return padded_tokens(tokens) // tile


def _tiles(kernel: Kernel, query: torch.Tensor, choose: Choose) -> Tiles | None:
    return choose(kernel, query.shape[-1], _capability(query.device), query.element_size())


def _describe(tiles: Tiles, **tensors: torch.Tensor) -> dict[str, Any]:
    """Return what the kernel loads tiles from: tensors, or descriptors for the copy engine."""
    if not tiles.copy_engine:
        return dict(tensors)
    describe: Any = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    made = {}
    for name, tensor in tensors.items():
        rows = tiles.keys if name in ("key", "value") else tiles.queries
        if tensor.dim() == 3:
            made[name] = describe.from_tensor(tensor.flatten(1), [rows, tensor.shape[-1]])
        else:
            made[name] = describe.from_tensor(tensor.flatten(), [rows])
    return made


def _current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current device, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _launch(
    kernel: Kernel, grid: tuple[int, int], query: torch.Tensor, key: torch.Tensor, layout: Layout,
    tiles: Tiles, arguments: tuple[Any, ...], **constants: bool,
) -> None:  # fmt: skip
    tokens, heads, size = query.shape
    code = getattr(_kernels(), f"{kernel}_kernel")
    with _current_device(query.device):
        code[grid](
            *arguments, tokens, layout.scale, layout.cap or 1.0,
            HEADS=heads, SHARED=key.shape[1], D=size, WIDE=padded_head_size(size),
            BLOCK_M=tiles.queries, BLOCK_N=tiles.keys, WINDOW=layout.window,
            CAPPED=bool(layout.cap), COPY_ENGINE=tiles.copy_engine,
            num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True, **constants,
        )  # fmt: skip
