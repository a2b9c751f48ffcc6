"""Make the C library return freed memory to the OS."""

from __future__ import annotations

import os

from penstock import _native
from penstock.units import MiB

LARGE_NBYTES = 4 * MiB
"""Blocks from this size on get their own mapping. Smaller ones stay in the heap: a new mapping
costs a page fault for every 4 KiB."""


def return_freed_memory() -> None:
    """Return blocks of `LARGE_NBYTES` and more to the OS as soon as they are freed.

    This holds for the whole process from now on, unless its environment configures the allocator.

    By default, glibc raises its mmap threshold (up to 32 MiB) when a large block is freed, and
    serves later blocks below it from the heap. There a freed block stays resident as long as any
    block above it is in use. A process that computes on the CPU then holds up to a quarter more
    memory than it uses, and a different amount in every run.
    """
    settings = [name for name in os.environ if name.startswith("MALLOC_")]
    settings.append(os.environ.get("GLIBC_TUNABLES", "").upper())
    if not any("MMAP_THRESHOLD" in each or "TRIM_THRESHOLD" in each for each in settings):
        _native.map_blocks_from(LARGE_NBYTES)
