"""How fast a disk is through the store: `penstock bench storage`. Room: hold.

Three patterns: reading, writing, and the sweep's mix, which reads extent k+1 while it writes
extent k-1. Both directions of the mix count.
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
from penstock.storage.tickets import Ticket
from penstock.units import MiB

Pattern = Literal["read", "write", "mixed"]
PATTERNS: tuple[Pattern, ...] = ("write", "read", "mixed")

_CHUNK = 32 * MiB
"""An extent of the benchmark: a few layers' worth of one role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One row: bytes a second of each pass."""

    engine: str
    pattern: Pattern
    request_nbytes: int
    depth: int
    verify: bool
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


def bench_storage(
    path: str | Path,
    *,
    nbytes: int = 1024 * MiB,
    request_nbytes: Sequence[int] = (1 * MiB, 4 * MiB),
    passes: int = 3,
    verify: bool = False,
    erase: bool = False,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Rate]:
    """Rates of every engine that runs here. `progress` is called with the share done, 0 to 1."""
    engines = list(dict.fromkeys([choose_engine().name, "threads"]))
    todo = [(engine, request) for engine in engines for request in request_nbytes]
    rates: list[Rate] = []
    for number, (engine, request) in enumerate(todo):
        options = StoreOptions(request_nbytes=request)
        with Store.create(
            path, nbytes, engine=engine, verify=verify, erase=erase, options=options
        ) as store:
            bench = StorageBench(store, nbytes)
            bench.run("write")  # the first write of new space pays for its metadata
            samples: dict[Pattern, list[float]] = {pattern: [] for pattern in PATTERNS}
            for turn in range(passes):
                for pattern in PATTERNS:
                    samples[pattern].append(bench.run(pattern))
                progress((number + (turn + 1) / passes) / len(todo))
        rates += [
            Rate(
                engine=engine, pattern=pattern, request_nbytes=request, depth=options.depth,
                verify=verify, samples=tuple(samples[pattern]),
            )
            for pattern in PATTERNS
        ]  # fmt: skip
    return rates


class StorageBench:
    """A row of extents over a store, moved through a few chunks of one arena."""

    def __init__(self, store: Store, nbytes: int, *, chunk: int = _CHUNK, lanes: int = 4) -> None:
        self._store = store
        count = max(2 * lanes, nbytes // chunk)
        chunk = nbytes // count // store.unit * store.unit
        self._extents = [store.allocate(chunk, name=f"chunk {i}") for i in range(count)]
        arena = Arena(lanes * chunk)
        self._lanes = [arena.take(chunk, align=store.alignment) for _ in range(lanes)]
        # Noise, which nothing below can compress, and the same everywhere: an extent then holds the
        # same bytes whatever was written last, with its checksum or without.
        noise = os.urandom(chunk)
        for lane in self._lanes:
            memoryview(lane)[:] = noise
        store.register(arena)

    @property
    def nbytes(self) -> int:
        return sum(extent.stored_nbytes for extent in self._extents)

    def run(self, pattern: Pattern) -> float:
        """One pass over all extents; bytes a second."""
        began = time.perf_counter()
        moved = 0
        tickets: list[Ticket] = []
        for start, lane in zip(self._starts(pattern), self._in_turn(), strict=False):
            if len(tickets) == len(self._lanes):
                tickets.pop(0).wait()  # the lane is free again
            tickets.append(start(lane))
            moved += tickets[-1].length
        self._store.wait_all(tickets)
        return moved / (time.perf_counter() - began)

    def _in_turn(self) -> Iterator[_native.Block]:
        while True:
            yield from self._lanes

    def _starts(self, pattern: Pattern) -> Iterator[Callable[[_native.Block], Ticket]]:
        store, extents = self._store, self._extents
        for number, extent in enumerate(extents):
            if pattern in ("read", "mixed"):
                yield lambda lane, e=extent: store.start_read(e, lane)  # type: ignore[misc]
            # The mix writes an extent whose read has been waited for: one that left its lane.
            behind = len(self._lanes)
            target = extent if pattern == "write" else extents[number - behind]
            if pattern == "write" or (pattern == "mixed" and number >= behind):
                yield lambda lane, e=target: store.start_write(e, lane)  # type: ignore[misc]
