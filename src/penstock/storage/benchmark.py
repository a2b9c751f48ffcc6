"""Measure how fast a disk is through the store: `penstock bench storage`.

There are three patterns: reading, writing, and the mix of an optimizer sweep, which reads one
extent while it writes an earlier one. A rate counts the bytes of both directions.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock import _native
from penstock.memory.arena import Arena
from penstock.storage.engines import choose_engine
from penstock.storage.store import Store, StoreOptions
from penstock.storage.tickets import StoreTicket
from penstock.units import MiB

Pattern = Literal["read", "write", "mixed"]
PATTERNS: tuple[Pattern, ...] = ("write", "read", "mixed")

_CHUNK = 32 * MiB
"""Size of an extent of the benchmark, comparable to a few layers of one kind of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One row of the result."""

    engine: str
    pattern: Pattern
    request_nbytes: int
    depth: int
    verify: bool
    samples: tuple[float, ...]
    """Bytes per second of each pass."""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def bench_storage(
    path: str | Path,
    *,
    nbytes: int = 1024 * MiB,
    request_nbytes: Sequence[int] = (1 * MiB, 4 * MiB),
    passes: int = 3,
    verify: bool = True,
    erase: bool = False,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Rate]:
    """Measure every engine that runs here. `progress` receives the share done, from 0 to 1."""
    engines = list(dict.fromkeys([choose_engine().name, "threads"]))
    configurations = [(engine, request) for engine in engines for request in request_nbytes]
    rates: list[Rate] = []
    for number, (engine, request) in enumerate(configurations):
        options = StoreOptions(request_nbytes=request)
        with Store.create(
            path, nbytes, engine=engine, verify=verify, erase=erase, options=options
        ) as store:
            bench = StorageBench(store, nbytes)
            # Do not time the first write: it also allocates the file system's metadata.
            bench.run("write")
            samples: dict[Pattern, list[float]] = {pattern: [] for pattern in PATTERNS}
            for turn in range(passes):
                for pattern in PATTERNS:
                    samples[pattern].append(bench.run(pattern))
                progress((number + (turn + 1) / passes) / len(configurations))
        rates += [
            Rate(
                engine=engine, pattern=pattern, request_nbytes=request, depth=options.depth,
                verify=verify, samples=tuple(samples[pattern]),
            )
            for pattern in PATTERNS
        ]  # fmt: skip
    return rates


class StorageBench:
    """Extents that cover a store, transferred through a few buffers."""

    def __init__(self, store: Store, nbytes: int, *, chunk: int = _CHUNK, lanes: int = 4) -> None:
        self._store = store
        count = max(2 * lanes, nbytes // chunk)
        chunk = nbytes // count // store.unit * store.unit
        self._extents = [store.allocate(chunk, name=f"chunk {i}") for i in range(count)]
        arena = Arena(lanes * chunk)
        self._buffers = [arena.take(chunk, align=store.alignment) for _ in range(lanes)]
        # Random bytes cannot be compressed. They are the same in every buffer, so that an extent
        # holds the same bytes whichever buffer was written last.
        noise = os.urandom(chunk)
        for buffer in self._buffers:
            memoryview(buffer)[:] = noise
        store.register(arena)

    @property
    def nbytes(self) -> int:
        """Size of all extents."""
        return sum(extent.stored_nbytes for extent in self._extents)

    def run(self, pattern: Pattern) -> float:
        """Make one pass over all extents and return bytes per second."""
        start_time = time.perf_counter()
        moved = 0
        tickets: list[StoreTicket] = []
        for start, buffer in zip(self._starts(pattern), self._cycle_buffers(), strict=False):
            if len(tickets) == len(self._buffers):
                tickets.pop(0).wait()  # its buffer is free again
            tickets.append(start(buffer))
            moved += tickets[-1].length
        self._store.wait_all(tickets)
        return moved / (time.perf_counter() - start_time)

    def _cycle_buffers(self) -> Iterator[_native.Block]:
        while True:
            yield from self._buffers

    def _starts(self, pattern: Pattern) -> Iterator[Callable[[_native.Block], StoreTicket]]:
        """Yield functions that start the transfers of a pass in order."""
        store, extents = self._store, self._extents
        for number, extent in enumerate(extents):
            if pattern in ("read", "mixed"):
                yield lambda buffer, e=extent: store.start_read(e, buffer)  # type: ignore[misc]
            # The mix writes an extent whose read is done: the one that used this buffer before.
            behind = len(self._buffers)
            target = extent if pattern == "write" else extents[number - behind]
            if pattern == "write" or (pattern == "mixed" and number >= behind):
                yield lambda buffer, e=target: store.start_write(e, buffer)  # type: ignore[misc]
