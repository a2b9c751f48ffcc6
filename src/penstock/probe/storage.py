"""Storage paths: reads and writes by request length and depth. Room: measure.

Through the store's own engine, so that it is what training will get.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.errors import ProbeError
from penstock.machine import Figure, StoragePath, StorageRate
from penstock.machine_parts import StorageOperation
from penstock.probe.progress import Progress
from penstock.probe.sampling import Effort, take_rate
from penstock.probe.scratch import ALIGNMENT, ScratchFile
from penstock.units import GiB, KiB, MiB, format_bytes

Clock = Callable[[], float]
OPERATIONS: tuple[StorageOperation, ...] = ("write", "read", "both")

MAX_FILE_BYTES = 1 * GiB
MAX_SHARE = 0.05
"""Of the free space: the probe's file takes no more than that, nor more than `MAX_FILE_BYTES`."""

MAX_BUFFER_BYTES = 256 * MiB
FILL_BLOCK = 8 * MiB


class Mover(Protocol):
    """Moves blocks, so many in flight."""

    def __call__(self, operation: StorageOperation, offsets: Sequence[int]) -> None: ...


class BlockFile(Protocol):
    """What is measured."""

    def mover(
        self, buffer: memoryview, *, block: int, depth: int
    ) -> AbstractContextManager[Mover]: ...
    def finish_writes(self) -> None: ...
    def forget(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One figure to take."""

    operation: StorageOperation
    block: int
    depth: int

    @property
    def in_flight(self) -> int:
        return self.block * self.depth

    def __str__(self) -> str:
        return f"{self.operation}, {format_bytes(self.block)} x {self.depth}"


def requests(*, quick: bool) -> tuple[Request, ...]:
    """What is asked of each path."""
    blocks = (64 * KiB, MiB, 8 * MiB) if quick else (4 * KiB, 64 * KiB, MiB, 4 * MiB, 16 * MiB)
    depths = (1, 8) if quick else (1, 4, 16, 32)
    return tuple(
        request
        for operation in OPERATIONS
        for block in blocks
        for depth in depths
        if operation != "both" or (depth > 1 and block >= MiB)
        if (request := Request(operation, block, depth)).in_flight <= MAX_BUFFER_BYTES
    )


def room(directory: Path) -> int:
    """Bytes that the probe's file may take."""
    stats = os.statvfs(directory)
    free = int(stats.f_bavail * stats.f_frsize * MAX_SHARE)
    return min(MAX_FILE_BYTES, free) // MiB * MiB


def probe_path(
    path: StoragePath, wanted: Sequence[Request], effort: Effort, progress: Progress
) -> StoragePath:
    """The path with its rates filled in. Its file is gone when this returns or raises."""
    directory = Path(path.path)
    if not directory.is_dir():
        raise ProbeError("it is not a directory, and the probe writes to nothing else")
    if (most := room(directory)) < MiB:
        raise ProbeError(
            f"the probe takes at most {MAX_SHARE:.0%} of the free space, and here that is "
            f"less than 1 MiB"
        )
    with ScratchFile(directory) as file:
        bench = Bench(file, wanted)
        if not file.direct:
            progress.notes.append(
                f"{path.path}: no direct I/O on this file system; figures include the page cache"
            )
        progress.say(f"{path.path}: writing the file to measure with")
        bench.fill(most, effort.setup_seconds)
        rates = bench.rates(path.path, wanted, effort, progress)
        return dataclasses.replace(path, rates=rates, direct=file.direct)


class Bench:
    """A file, and a buffer to measure it with."""

    def __init__(
        self, file: BlockFile, wanted: Sequence[Request], clock: Clock = time.perf_counter
    ) -> None:
        self._file = file
        self._clock = clock
        self._buffer = _noise(max(FILL_BLOCK, *(r.in_flight for r in wanted)))
        self._dice = random.Random(20)
        self.nbytes = 0

    def fill(self, most: int, seconds: float) -> None:
        """Write the file for the first time, as far as the time allows, and one block of it anyway.

        Blocks that were never written read as zeros without the device being asked.
        """
        start, block = self._clock(), min(FILL_BLOCK, most)
        with self._file.mover(self._buffer, block=block, depth=1) as move:
            while self.nbytes + block <= most and (
                self.nbytes == 0 or self._clock() - start < seconds
            ):
                move("write", [self.nbytes])
                self.nbytes += block
        self._file.finish_writes()

    def rates(
        self, name: str, wanted: Sequence[Request], effort: Effort, progress: Progress
    ) -> tuple[StorageRate, ...]:
        rates = []
        for request in wanted:
            figure = progress.take(f"{name}: {request}", partial(self.rate, request, effort))
            if figure is not None:
                rates.append(StorageRate(**dataclasses.asdict(request), bytes_per_second=figure))
        return tuple(rates)

    def rate(self, request: Request, effort: Effort) -> Figure:
        if request.in_flight > self.nbytes:
            raise ProbeError(
                f"it needs {format_bytes(request.in_flight)} at once, and the file has "
                f"{format_bytes(self.nbytes)}: there was no space or no time for more"
            )
        block, depth = request.block, request.depth
        with self._file.mover(self._buffer, block=block, depth=depth) as move:
            run = partial(self.run, move, request)
            return take_rate(run, effort, unit=request.in_flight, most=self.nbytes)

    def run(self, move: Mover, request: Request, nbytes: int) -> float:
        """Seconds for `nbytes` in whole blocks, in random order, so many in flight."""
        blocks = self._dice.sample(range(self.nbytes // request.block), nbytes // request.block)
        offsets = [block * request.block for block in blocks]
        if request.operation != "write":
            self._file.forget()
        start = self._clock()
        move(request.operation, offsets)
        if request.operation != "read":
            self._file.finish_writes()
        return self._clock() - start


def _noise(nbytes: int) -> memoryview:
    """An aligned buffer that no file system or device can compress."""
    buffer = mmap.mmap(-1, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    tile = os.urandom(min(MiB, len(buffer)))
    for at in range(0, len(buffer), len(tile)):
        buffer[at : at + len(tile)] = tile[: len(buffer) - at]
    return memoryview(buffer)
