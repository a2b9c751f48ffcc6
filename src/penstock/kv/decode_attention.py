"""Launching a Triton kernel as it was launched before. Room: hold.

Triton asks every argument of every launch how the kernel may be specialised for it, which takes the
host longer than the launch itself; without graphs, a token has three such launches in each layer.
A kernel that a launch has compiled is kept here, and is given its arguments at once the next time
they are of the same kind.
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

ALIGNED = 16
"""Bytes: Triton loads more at once where it knows that a pointer is a multiple of this."""

_compiled: dict[tuple[object, ...], Any] = {}
"""By kernel, warps, constants and kinds of arguments. Few: none of them grows with the rows."""


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[torch.Tensor | int | float],
    constants: tuple[int | bool, ...],
    *,
    warps: int,
) -> None:
    """On the current device, where all tensors are. `constants` are the kernel's last parameters,
    in order. Kernels are a module's own, and never go."""
    like = (id(kernel), warps, constants, *map(_kind, arguments))
    ready = _compiled.get(like)
    if ready is not None:
        ready[grid](*arguments, *constants)
        return
    made = kernel[grid](*arguments, *constants, num_warps=warps)
    if made is not None and takes_constants():  # Triton's interpreter compiles nothing
        _compiled[like] = made


@functools.cache
def takes_constants() -> bool:
    """Whether what is compiled is given all parameters again, as from Triton 3.3 on; before that it
    was given those that are no constants."""
    version = str(importlib.import_module("triton").__version__).split(".")
    return tuple(map(int, version[:2])) >= (3, 3)


def _kind(argument: torch.Tensor | int | float) -> object:
    """Arguments of one kind are served by the same code. Numbers are of their own kind each, which
    is finer than Triton's."""
    if isinstance(argument, torch.Tensor):
        return argument.device, argument.dtype, argument.data_ptr() % ALIGNED == 0
    return argument


# --------
# Attention of passes that make one token a row: which kernel, and how it is cut. Room: hold.
#
# The kernel is Penstock's own, in Triton. Where Triton is missing, `attention` does without.

TILE = 16 * 1024
"""Bytes of keys that a program reads at once, and as many of values. With STAGES of them, two are
on their way while one is computed with: 64 KiB a program, 192 KiB an SM. An H200 needs about 4 MiB
in flight to read 4.8 TB/s at a latency of 800 ns, which is 30 KiB an SM: enough also when memory
is busy and answers at a third of that speed."""

STAGES = 3
WARPS = 4
"""A tile is 16 query heads by 64 tokens at most times: more warps would share too little."""

RESIDENT = 3
"""Programs that an SM holds at once: of its 228 KiB each takes 70 KiB, nearly all of it tiles."""

MOST_SPLITS = 128
"""Parts of a row at most: all are put together in one tile."""

LONGEST_PART = 4096
"""Keys of a part, if there may be as many parts. Of rows that differ in length the longest ends
last; this bounds for how long it reads alone."""

FULL = 0.95
"""How much of the card the last programs to run should fill. A row of 131072 keys in 64 parts,
which are 1.3 times what the card holds, took 144 us; in 99, which are twice that, 133."""

HEADS = (8, 256)
"""From the narrowest to the widest head that the kernel knows."""

OLDEST = (8, 0)
"""The compute capability from which on a GPU fetches ahead into shared memory, and has enough of it
for the tiles. Older ones go on as those without Triton."""

MANY_QUERIES = 32
"""Query heads that share keys; with more, tiles are fetched one ahead only, to leave them room."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Spots:
    """Where rows lie that get one token each. What is on the device is read there only."""

    starts: torch.Tensor
    """Where each row begins, in tokens from the beginning of the keys that attention is given."""
    ends: torch.Tensor
    """Tokens of each row, the new one included; 0: padding, of which nothing is read."""
    longest: int
    """No row is longer: a `bucket`, since the number of parts depends on it."""


@functools.cache
def kernels() -> Any:
    """The module of kernels, or None where Triton is not there."""
    try:
        return importlib.import_module("penstock.kv.decode_kernels")
    except ImportError as missing:
        if (missing.name or "").partition(".")[0] != "triton":
            raise
        return None


@functools.cache
def available(device: torch.device) -> bool:
    """Whether decode passes on this device run by the kernel. Says once where only Triton lacks."""
    if device.type != "cuda":
        return os.environ.get("TRITON_INTERPRET") == "1" and kernels() is not None
    if kernels() is None:
        warnings.warn(
            "triton is not installed: tokens are made with torch's own attention, several times "
            "slower for long contexts, and without CUDA graphs; pip install triton",
            KvWarning,
            stacklevel=2,
        )
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


def fits(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether the kernel computes such queries."""
    least, most = HEADS
    return dtype in _DTYPES and least <= head <= most and head % 8 == 0 and available(device)


def bucket(longest: int) -> int:
    """The bound of lengths that parts are counted by: few of them, so that few launches differ."""
    bound = LONGEST_PART
    while bound < longest:
        bound *= 4
    return bound


@functools.cache  # asked for every layer of every token
def num_splits(rows: int, shared: int, longest: int, multiprocessors: int, block: int) -> int:
    """Into how many parts each row is cut. The same for all, and known before lengths are.

    As many programs as the card holds at once; where there are more rows than that, some four
    times as many, so that the last ones to run are a small share. And none too long.
    """
    programs, held = rows * shared, RESIDENT * multiprocessors
    fill = held // programs if programs <= held else -(-4 * held // programs)
    least = -(-longest // LONGEST_PART)
    wanted = fill if fill >= least else _filling(programs, held, least)
    return max(1, min(wanted, MOST_SPLITS, -(-longest // block)))


def _filling(programs: int, held: int, least: int) -> int:
    """So many parts or a few more, so that the last programs to run find company."""
    for splits in range(least, 2 * least):
        if (programs * splits - 1) % held + 1 >= FULL * held:
            return splits
    return least


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spots: Spots,
    scaling: float | None, window: int | None, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """`query` is [rows, heads, 1, head size], keys and values [any, shared heads, any, head size],
    strided as they like but for the last; the answer is [rows, 1, heads, head size]."""
    rows, heads, _, head = query.shape
    shared, device = key.shape[1], query.device
    query = query if query.stride(3) == 1 else query.contiguous()
    assert key.stride(3) == value.stride(3) == 1, "keys and values are read as they lie"
    wide = max(16, power(head))  # no matrix product is narrower
    block = max(16, min(128, TILE // (wide * key.element_size())))
    splits = num_splits(
        rows, shared, min(spots.longest, window or spots.longest), _multiprocessors(device), block
    )
    group = max(16, power(heads // shared))
    out = torch.empty(rows, 1, heads, head, dtype=query.dtype, device=device)
    size = rows * heads * splits if splits > 1 else 0
    partial, tops, sums = (
        torch.empty(size * each, dtype=torch.float32, device=device) for each in (head, 1, 1)
    )
    code, seen, stages = kernels(), window or 0, STAGES if group <= MANY_QUERIES else 2
    scale = head**-0.5 if scaling is None else float(scaling)
    with on(device):
        launch(
            code.part_kernel, (shared, rows, splits),
            (query, key, value, spots.starts, spots.ends, out, partial, tops, sums, splits,
             scale, float(softcap or 1.0), query.stride(0), query.stride(1),
             key.stride(2), key.stride(1), value.stride(2), value.stride(1)),
            (heads // shared, group, head, wide, splits == 1, block, stages, seen,
             softcap is not None), warps=WARPS,
        )  # fmt: skip
        if splits > 1:
            launch(
                code.join_kernel, (heads, rows, 1),
                (spots.ends, out, partial, tops, sums, splits),
                (head, wide, power(splits), block, seen), warps=WARPS,
            )  # fmt: skip
    return out


def write(
    key: torch.Tensor, value: torch.Tensor, to_key: torch.Tensor, to_value: torch.Tensor,
    places: torch.Tensor,
) -> None:  # fmt: skip
    """Keys and values of one new token a row, [rows, shared heads, 1, head size], to each row's
    place in [tokens, shared heads, head size]."""
    rows, shared, _, head = key.shape
    key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (key, value))
    with on(key.device):
        launch(
            kernels().write_kernel, (rows, 1, 1),
            (key, value, to_key, to_value, places, *key.stride()[:2], *value.stride()[:2],
             *to_key.stride()[:2], *to_value.stride()[:2]),
            (shared, power(shared), head, power(head)), warps=WARPS,
        )  # fmt: skip


def power(number: int) -> int:
    """The power of two that is no less."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # in the interpreter programs run one after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return torch.cuda.device(device)
    return contextlib.nullcontext()
