"""Attention for passes that generate one token per row, by Penstock's own Triton kernels.

This module decides whether the kernels fit, into how many parts they split rows, and how they are
launched; `penstock.kv.decode_kernels` has the kernels themselves. Where Triton is missing,
`penstock.generate.attention` uses torch's kernels instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.kv.errors import KvWarning

TILE_NBYTES = 16 * 1024
"""Bytes of keys that a program reads at a time, and as many of values. With STAGES tiles, two are
in flight while one is computed with: 64 KiB per program, 192 KiB per SM. To read 4.8 TB/s at a
latency of 800 ns, an H200 needs about 4 MiB in flight, which is 30 KiB per SM. So this is enough
even when memory is busy and responds at a third of that speed."""

STAGES = 3
"""Number of tiles in the pipeline of a program."""

WARPS = 4
"""Warps per program. A tile is usually 16 query heads by 64 tokens; more warps would each get too
little of it."""

PROGRAMS_PER_SM = 3
"""Number of programs that fit on an SM: each takes 70 KiB of its 228 KiB, nearly all for tiles."""

MAX_SPLITS = 128
"""Maximum number of parts of a row: one tile has to hold the results of all of them."""

MAX_PART_KEYS = 4096
"""Number of keys in a part, unless MAX_SPLITS forbids it. Among rows of different lengths the
longest ends last; this bounds how long it reads alone."""

MIN_LAST_WAVE = 0.95
"""How much of the GPU the last wave of programs should fill. A row of 131072 keys in 64 parts,
which are 1.3 waves, took 144 us; in 99 parts, which are two waves, 133 us."""

HEAD_SIZES = (8, 256)
"""The smallest and the largest head size that the kernels support."""

MIN_CAPABILITY = (8, 0)
"""Compute capability from which on a GPU copies asynchronously into shared memory, and has enough
of it for the tiles. Older GPUs use torch's kernels."""

MAX_PIPELINED_QUERIES = 32
"""Number of query heads that share keys above which only one tile is prefetched, because the
queries need the shared memory."""

POINTER_ALIGNMENT = 16
"""Bytes. Triton loads wider vectors where it knows that a pointer is a multiple of this."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class RowSpans:
    """The spans of the cache that hold the rows of a decode pass.

    The tensors are on the device and are only read there, so the same launches, and a CUDA graph of
    them, serve rows as they grow.
    """

    starts: torch.Tensor
    """Where each row begins, in tokens from the beginning of the keys passed to attention."""
    ends: torch.Tensor
    """Number of tokens in each row, the new one included. 0 marks padding: nothing is read."""
    longest: int
    """Upper bound of `ends`, as `length_bound` returns it: the number of parts depends on it."""


@functools.cache
def kernels() -> Any:
    """Return the module of kernels, or None if Triton is not installed."""
    try:
        return importlib.import_module("penstock.kv.decode_kernels")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


@functools.cache
def available(device: torch.device) -> bool:
    """Return whether the kernels run on this device. Warn once if only Triton is missing."""
    if device.type != "cuda":
        return os.environ.get("TRITON_INTERPRET") == "1" and kernels() is not None
    if kernels() is None:
        warnings.warn(
            "triton is not installed, so tokens are generated with torch's own attention, which is "
            "several times slower for long contexts, and without CUDA graphs. To install it: "
            "pip install triton",
            KvWarning,
            stacklevel=2,
        )
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def fits(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Return whether the kernels support queries of this type and head size on this device."""
    smallest, largest = HEAD_SIZES
    return dtype in _DTYPES and smallest <= head <= largest and head % 8 == 0 and available(device)


def length_bound(longest: int) -> int:
    """Round a length up to one of few bounds: each bound needs launches, and graphs, of its own."""
    bound = MAX_PART_KEYS
    while bound < longest:
        bound *= 4
    return bound


@functools.cache  # called for every layer of every token
def num_splits(rows: int, shared: int, longest: int, multiprocessors: int, block: int) -> int:
    """Decide into how many parts each row is split: one number for rows of all lengths.

    There are as many programs as the GPU runs concurrently. With more rows than that, there are
    about four times as many, so that the last wave is a small share of the time. No part is longer
    than MAX_PART_KEYS, unless there would be too many.
    """
    programs, concurrent = rows * shared, PROGRAMS_PER_SM * multiprocessors
    fill = concurrent // programs if programs <= concurrent else -(-4 * concurrent // programs)
    least = -(-longest // MAX_PART_KEYS)
    wanted = fill if fill >= least else _fill_last_wave(programs, concurrent, least)
    return max(1, min(wanted, MAX_SPLITS, -(-longest // block)))


def _fill_last_wave(programs: int, concurrent: int, least: int) -> int:
    """Return `least` splits, or up to twice as many if that fills the last wave of programs."""
    for splits in range(least, 2 * least):
        if (programs * splits - 1) % concurrent + 1 >= MIN_LAST_WAVE * concurrent:
            return splits
    return least


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: RowSpans,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attend with one query per row.

    `query` is `[rows, heads, 1, head size]`; keys and values are `[any, shared heads, any, head
    size]` with any strides but for the last dimension. Returns `[rows, 1, heads, head size]`.
    """
    rows, heads, _, head = query.shape
    shared, device = key.shape[1], query.device
    query = query if query.stride(3) == 1 else query.contiguous()
    assert key.stride(3) == value.stride(3) == 1, "the head dimension must be contiguous"
    wide = max(16, next_power_of_two(head))  # the smallest matrix product of tl.dot
    block = max(16, min(128, TILE_NBYTES // (wide * key.element_size())))
    splits = num_splits(
        rows, shared, min(spans.longest, window or spans.longest), _multiprocessors(device), block
    )
    group = max(16, next_power_of_two(heads // shared))
    out = torch.empty(rows, 1, heads, head, dtype=query.dtype, device=device)
    size = rows * heads * splits if splits > 1 else 0
    partial, tops, sums = (
        torch.empty(size * each, dtype=torch.float32, device=device) for each in (head, 1, 1)
    )
    code, visible = kernels(), window or 0
    stages = STAGES if group <= MAX_PIPELINED_QUERIES else 2
    scale = head**-0.5 if scaling is None else float(scaling)
    with current_device(device):
        launch(
            code.part_kernel, (shared, rows, splits),
            (query, key, value, spans.starts, spans.ends, out, partial, tops, sums, splits,
             scale, float(softcap or 1.0), query.stride(0), query.stride(1),
             key.stride(2), key.stride(1), value.stride(2), value.stride(1)),
            (heads // shared, group, head, wide, splits == 1, block, stages, visible,
             softcap is not None), warps=WARPS,
        )  # fmt: skip
        if splits > 1:
            launch(
                code.join_kernel, (heads, rows, 1),
                (spans.ends, out, partial, tops, sums, splits),
                (head, wide, next_power_of_two(splits), block, visible), warps=WARPS,
            )  # fmt: skip
    return out


def write(
    key: torch.Tensor, value: torch.Tensor, to_key: torch.Tensor, to_value: torch.Tensor,
    positions: torch.Tensor,
) -> None:  # fmt: skip
    """Write the keys and values of one new token per row to the cache.

    They are `[rows, shared heads, 1, head size]`, and go to `positions` of
    `[tokens, shared heads, head size]`.
    """
    rows, shared, _, head = key.shape
    key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (key, value))
    with current_device(key.device):
        launch(
            kernels().write_kernel, (rows, 1, 1),
            (key, value, to_key, to_value, positions, *key.stride()[:2], *value.stride()[:2],
             *to_key.stride()[:2], *to_value.stride()[:2]),
            (shared, next_power_of_two(shared), head, next_power_of_two(head)), warps=WARPS,
        )  # fmt: skip


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter runs programs one after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current device, on which Triton launches kernels."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return torch.cuda.device(device)
    return contextlib.nullcontext()


# Launching.
#
# For every launch, Triton examines every argument to decide how to specialize the kernel. That
# takes the host longer than the launch itself, and without CUDA graphs a token has three such
# launches in each layer. So the compiled kernel of a launch is kept here, and launched directly the
# next time the arguments are of the same kind.

_compiled: dict[tuple[object, ...], Any] = {}
"""Compiled kernels by kernel, warps, constants and kinds of arguments. There are few: none of these
depends on the rows."""


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[torch.Tensor | int | float],
    constants: tuple[int | bool, ...],
    *,
    warps: int,
) -> None:
    """Launch a kernel on the current device, where all tensors must be.

    `constants` are the kernel's last parameters, in order. Kernels are identified by `id`, so they
    must be module-level functions, which are never freed.
    """
    key = (id(kernel), warps, constants, *map(_kind, arguments))
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants)
        return
    launched = kernel[grid](*arguments, *constants, num_warps=warps, enable_fp_fusion=True)
    if launched is not None and compiled_kernels_take_constants():  # the interpreter returns None
        _compiled[key] = launched


@functools.cache
def compiled_kernels_take_constants() -> bool:
    """Return whether a compiled kernel is launched with all parameters, as from Triton 3.3 on.

    Earlier versions take only the parameters that are not constants.
    """
    version = str(importlib.import_module("triton").__version__).split(".")
    return tuple(map(int, version[:2])) >= (3, 3)


def _kind(argument: torch.Tensor | int | float) -> object:
    """Return a key that is equal for arguments that the same compiled kernel serves.

    Numbers stand for themselves, which is finer than Triton's own distinction.
    """
    if isinstance(argument, torch.Tensor):
        return argument.device, argument.dtype, argument.data_ptr() % POINTER_ALIGNMENT == 0
    return argument
