"""What a benchmark takes of the machine: CPU time, memory, page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource

from penstock.storage.header import DATA_OFFSET


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def cached_nbytes(path: str) -> int:
    """How much of the file's data is in the page cache, asked with mincore."""
    length = os.path.getsize(path)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), length) as mapped:
        pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages)
        first = DATA_OFFSET // mmap.PAGESIZE
        return sum(page & 1 for page in pages[first:]) * mmap.PAGESIZE
