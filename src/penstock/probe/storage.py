"""A file to measure with, that no end of the program leaves behind. Room: measure."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from penstock import _native
from penstock.errors import ProbeError
from penstock.machine.machine import Figure, StorageOperation, StoragePath, StorageRate
from penstock.probe.measurement import Effort, Progress, take_rate
from penstock.storage.direct_file import BLOCK, DirectFile, is_direct_io_refused
from penstock.storage.engines import choose_engine, wait_for_transfers
from penstock.units import GiB, KiB, MiB, format_bytes

ALIGNMENT = BLOCK
"""Alignment of direct requests."""

WORKERS = 2
"""Threads that serve io_uring, as many as a store has."""

CLOSE_SECONDS = 10.0


class ScratchFile:
    """An open file without a name: the kernel frees it with the process, kill -9 included.

    Past the page cache (O_DIRECT) where the file system has that; `direct` says so.
    """

    def __init__(self, directory: Path, *, direct: bool = True) -> None:
        self._directory = directory
        self._file = self._open(direct=direct)

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def direct(self) -> bool:
        return self._file.direct

    @contextmanager
    def mover(self, buffer: memoryview, *, block: int, depth: int) -> Iterator[EngineMover]:
        """Moves blocks through the store's engine, `depth` in flight."""
        choice = choose_engine()
        engine = _native.StoreEngine(choice.name, [self._file.fd], ALIGNMENT, block, depth, WORKERS)
        try:
            yield EngineMover(engine, self._directory, buffer, block, depth)
        finally:
            engine.close(CLOSE_SECONDS)

    def finish_writes(self) -> None:
        """Return when what was written is off the page cache; direct writes never were on it."""
        if not self.direct:
            os.fdatasync(self._file.fd)

    def forget(self) -> None:
        """Ask the page cache to let go, so that a read is one of the device."""
        if not self.direct:
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self, *, direct: bool) -> DirectFile:
        if direct:
            try:
                file = DirectFile(_open_nameless(self._directory, os.O_DIRECT), direct=True)
            except OSError as error:
                if not is_direct_io_refused(error):
                    raise
            else:
                # Some file systems refuse O_DIRECT only at the first write.
                try:
                    file.write_blocks(0, bytes(ALIGNMENT))
                except BaseException:
                    file.close()
                    raise
                return file
        return DirectFile(_open_nameless(self._directory, 0), direct=False)


class EngineMover:
    """Blocks of one length between a file and a buffer that has one for each request in flight."""

    def __init__(
        self,
        engine: _native.StoreEngine,
        directory: Path,
        buffer: memoryview,
        block: int,
        depth: int,
    ) -> None:
        self._engine, self._directory = engine, directory
        self._buffer, self._block, self._depth = buffer, block, depth
        self._address, _ = _native.buffer_span(buffer, True)

    def __call__(self, operation: StorageOperation, offsets: Sequence[int]) -> None:
        """Returns when all are moved. What requests that overtake each other read is no matter."""
        block, depth = self._block, self._depth
        pieces = [(0, at, k % depth * block, block, 0) for k, at in enumerate(offsets)]
        ways = {"write": (pieces, []), "read": ([], pieces), "both": (pieces[::2], pieces[1::2])}
        transfers = [
            self._engine.start(write, self._address, some, None)
            for write, some in zip((True, False), ways[operation], strict=True)
            if some
        ]
        wait_for_transfers(self._engine, transfers)
        failed = [transfer.failure for transfer in transfers if transfer.failure is not None]
        if not failed:
            return
        code, _, offset, _, _ = failed[0]
        if code == _native.END_OF_FILE:
            raise ProbeError(f"{self._directory}: the file ends at {offset}, before it should")
        raise OSError(code, os.strerror(code), str(self._directory))


def _open_nameless(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as refused:
        # EISDIR and ENOENT come from kernels and file systems that do not know O_TMPFILE.
        if refused.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    name = directory / f".penstock-probe-{uuid.uuid4().hex}"
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        name.unlink(missing_ok=True)


# --------
# Storage paths: reads and writes by request length and depth. Room: measure.
#
# Through the store's own engine, so that it is what training will get.

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
