"""The C library's heap, held to what is in use. Room: hold."""

from __future__ import annotations

import os

from penstock import _native
from penstock.units import MiB

LARGE = 4 * MiB
"""Smaller blocks stay in the heap: a mapping of its own costs a page fault for every 4 KiB."""


def return_freed_memory() -> None:
    """Have blocks of `LARGE` and more go back to the kernel when they are freed, for the whole
    process and from now on, unless its environment says where they come from.

    The C library would learn from the first large blocks that are freed to take those of up to
    32 MiB from its heap, where what lies above a hole keeps it: a process that computes on the CPU
    then holds up to a quarter more than it uses, and another amount in every run.
    """
    said = [name for name in os.environ if name.startswith("MALLOC_")]
    said.append(os.environ.get("GLIBC_TUNABLES", "").upper())
    if not any("MMAP_THRESHOLD" in each or "TRIM_THRESHOLD" in each for each in said):
        _native.map_blocks_from(LARGE)
