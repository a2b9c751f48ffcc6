"""What was freed goes back to the kernel, whatever lies above it."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.memory import heap

CHILD = """
import resource, sys
import torch
from penstock.memory.heap import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def block(mib):
    return torch.ones(mib << 20, dtype=torch.uint8)

if "hold" in sys.argv:
    return_freed_memory()
block(30)  # from which the C library learns, unless it was told
before = resident()
below = [block(6) for _ in range(32)]
above = block(6)
below.clear()
print((resident() - before) >> 20)
"""


def told_by(code: str, *argv: str, **environment: str) -> int:
    """The number that a process of its own prints."""
    said = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", code, *argv]
    return int(subprocess.check_output(command, env=said | environment, text=True))


def left_behind(*argv: str, **environment: str) -> int:
    """MiB that a process holds when it uses 6 of 198."""
    return told_by(CHILD, *argv, **environment)


def test_the_heap_as_it_is_keeps_what_lies_below() -> None:
    assert left_behind() > 100, "then holding it is no longer needed"


def test_a_held_heap_keeps_nothing() -> None:
    assert left_behind("hold") < 20


@pytest.mark.parametrize(
    "said",
    [
        {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
        {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"},
    ],
    ids=["variable", "tunable"],
)
def test_an_environment_that_says_otherwise_is_obeyed(said: dict[str, str]) -> None:
    assert left_behind("hold", **said) > 100


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")],
)
def test_so_is_one_that_says_how_much_stays_at_the_top(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(heap, "_native", SimpleNamespace(map_blocks_from=told.append))
    heap.return_freed_memory()
    monkeypatch.setenv(name, value)
    heap.return_freed_memory()

    assert told == [heap.LARGE]


AGAIN = """
import resource
import torch
from penstock.memory.heap import return_freed_memory

return_freed_memory()  # before anything was learned
block = lambda: torch.ones(3 << 20, dtype=torch.uint8)
block()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    block()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_blocks_that_stay_in_the_heap_are_not_new_pages_every_time() -> None:
    assert told_by(AGAIN) < 10 * 768, "768 pages each"
