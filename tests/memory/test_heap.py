"""Freed memory is returned to the OS even if a block above it is in use."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.memory import heap

BLOCK = """
import ctypes, resource, sys
from penstock.memory.heap import return_freed_memory

libc = ctypes.CDLL(None, use_errno=True)
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

class block:
    # Memory as torch's CPU allocator allocates it. Importing torch would take seconds.
    def __init__(self, mib):
        self.at = ctypes.c_void_p()
        assert libc.posix_memalign(ctypes.byref(self.at), 64, ctypes.c_size_t(mib << 20)) == 0
        libc.memset(self.at, 1, mib << 20)
    def __del__(self):
        libc.free(self.at)
"""

CHILD = (
    BLOCK
    + """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

if "return" in sys.argv:
    return_freed_memory()
block(30)  # freeing it raises the threshold of the C library
before = resident()
below = [block(6) for _ in range(32)]
above = block(6)
below.clear()
print((resident() - before) >> 20)
"""
)


def run_child(code: str, *argv: str, **environment: str) -> int:
    """Run code in a separate process and return the number that it prints."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", code, *argv]
    return int(subprocess.check_output(command, env=inherited | environment, text=True))


def left_behind(*argv: str, **environment: str) -> int:
    """Return the MiB that stay resident when 192 of 198 MiB are freed."""
    return run_child(CHILD, *argv, **environment)


def test_by_default_the_heap_keeps_freed_blocks() -> None:
    assert left_behind() > 100, "then return_freed_memory is no longer needed"


def test_freed_blocks_are_returned() -> None:
    assert left_behind("return") < 20


@pytest.mark.parametrize(
    "settings",
    [
        {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
        {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"},
    ],
    ids=["variable", "tunable"],
)
def test_a_threshold_in_the_environment_is_respected(settings: dict[str, str]) -> None:
    assert left_behind("return", **settings) > 100


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")],
)
def test_a_trim_threshold_in_the_environment_is_respected(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(heap, "_native", SimpleNamespace(map_blocks_from=calls.append))
    heap.return_freed_memory()
    monkeypatch.setenv(name, value)
    heap.return_freed_memory()

    assert calls == [heap.LARGE_NBYTES]


REPEATED = (
    BLOCK
    + """
return_freed_memory()  # before the threshold has changed
block(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    block(3)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
)


def test_smaller_blocks_reuse_the_pages_of_the_heap() -> None:
    assert run_child(REPEATED) < 10 * 768, "each block has 768 pages"
