"""Measure storage paths: reads and writes by request size and queue depth.

Requests go through the store's own engine, so that the figures are what training will get.
"""

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
from penstock.probe.measurement import Effort, Progress, measure_rate
from penstock.storage.direct_file import BLOCK, DirectFile, is_direct_io_refused
from penstock.storage.engines import choose_engine, wait_for_transfers
from penstock.units import GiB, KiB, MiB, format_bytes

ALIGNMENT = BLOCK
"""Alignment of direct requests in bytes."""

WORKERS = 2
"""Number of threads that serve io_uring, the same as in a store."""

CLOSE_SECONDS = 10.0
"""Time the engine has to finish its requests when it is closed."""

OPERATIONS: tuple[StorageOperation, ...] = ("write", "read", "both")

MAX_FILE_BYTES = 1 * GiB
"""Maximum size of the probe's file."""

MAX_SHARE = 0.05
"""Maximum share of the free space that the probe's file uses."""

MAX_BUFFER_BYTES = 256 * MiB
"""Maximum memory for the requests in flight."""

FILL_BLOCK = 8 * MiB
"""Size of the requests that write the file for the first time."""

Clock = Callable[[], float]


class ScratchFile:
    """An open file without a name: the kernel frees it when the process ends, even by SIGKILL.

    The file bypasses the page cache (O_DIRECT) if the file system supports that; `direct` says
    whether it does.
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
        """Whether the file bypasses the page cache."""
        return self._file.direct

    @contextmanager
    def mover(self, buffer: memoryview, *, block: int, depth: int) -> Iterator[EngineMover]:
        """Yield a mover that transfers blocks through the store's engine, `depth` in flight."""
        choice = choose_engine()
        engine = _native.StoreEngine(choice.name, [self._file.fd], ALIGNMENT, block, depth, WORKERS)
        try:
            yield EngineMover(engine, self._directory, buffer, block, depth)
        finally:
            engine.close(CLOSE_SECONDS)

    def finish_writes(self) -> None:
        """Flush the page cache to the device. Direct writes bypass it and need no flush."""
        if not self.direct:
            os.fdatasync(self._file.fd)

    def drop_page_cache(self) -> None:
        """Drop the file from the page cache, so that reads come from the device."""
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
    """Transfers blocks between a file and a buffer that has a block for each request in flight."""

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
        """Transfer the blocks at `offsets` and wait for all of them.

        Requests share the blocks of the buffer and may overtake each other; the data read is never
        used.
        """
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
            raise ProbeError(f"{self._directory}: the file ends at {offset}, earlier than expected")
        raise OSError(code, os.strerror(code), str(self._directory))


def _open_nameless(directory: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        # EISDIR and ENOENT come from kernels and file systems without O_TMPFILE.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    name = directory / f".penstock-probe-{uuid.uuid4().hex}"
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        name.unlink(missing_ok=True)


class Mover(Protocol):
    """Transfers blocks between a file and a buffer."""

    def __call__(self, operation: StorageOperation, offsets: Sequence[int]) -> None: ...


class BlockFile(Protocol):
    """The file that is measured. Tests replace it with a simulated disk."""

    def mover(
        self, buffer: memoryview, *, block: int, depth: int
    ) -> AbstractContextManager[Mover]: ...
    def finish_writes(self) -> None: ...
    def drop_page_cache(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A figure to measure: an operation with its request size and queue depth."""

    operation: StorageOperation
    """`read`, `write` or `both`."""

    block: int
    """Size of one request."""

    depth: int
    """Number of requests in flight."""

    @property
    def in_flight(self) -> int:
        """Bytes in flight at a time."""
        return self.block * self.depth

    def __str__(self) -> str:
        return f"{self.operation}, {format_bytes(self.block)} x {self.depth}"


def requests(*, quick: bool) -> tuple[Request, ...]:
    """Return the figures to measure for each path."""
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


def max_file_size(directory: Path) -> int:
    """Return the maximum size of the probe's file in this directory."""
    stats = os.statvfs(directory)
    free = int(stats.f_bavail * stats.f_frsize * MAX_SHARE)
    return min(MAX_FILE_BYTES, free) // MiB * MiB


def probe_path(
    path: StoragePath, requested: Sequence[Request], effort: Effort, progress: Progress
) -> StoragePath:
    """Return the path with its measured rates. The temporary file is gone afterwards."""
    directory = Path(path.path)
    if not directory.is_dir():
        raise ProbeError("it is not a directory; the probe only writes to directories")
    if (limit := max_file_size(directory)) < MiB:
        raise ProbeError(
            f"the probe uses at most {MAX_SHARE:.0%} of the free space, which is less than 1 MiB "
            f"here; free some space and probe again"
        )
    with ScratchFile(directory) as file:
        benchmark = StorageBenchmark(file, requested)
        if not file.direct:
            progress.notes.append(
                f"{path.path}: this file system does not support direct I/O; the figures include "
                "the page cache"
            )
        progress.report(f"{path.path}: writing the test file")
        benchmark.fill(limit, effort.setup_seconds)
        rates = benchmark.rates(path.path, requested, effort, progress)
        return dataclasses.replace(path, rates=rates, direct=file.direct)


class StorageBenchmark:
    """A file, and the buffer to measure it with."""

    def __init__(
        self, file: BlockFile, requested: Sequence[Request], clock: Clock = time.perf_counter
    ) -> None:
        self._file = file
        self._clock = clock
        self._buffer = _random_buffer(max(FILL_BLOCK, *(r.in_flight for r in requested)))
        self._random = random.Random(20)
        self.nbytes = 0

    def fill(self, limit: int, seconds: float) -> None:
        """Write the file for the first time: as much as the time allows, but at least one block.

        Reading a block that was never written returns zeros without accessing the device.
        """
        start, block = self._clock(), min(FILL_BLOCK, limit)
        with self._file.mover(self._buffer, block=block, depth=1) as move:
            while self.nbytes + block <= limit and (
                self.nbytes == 0 or self._clock() - start < seconds
            ):
                move("write", [self.nbytes])
                self.nbytes += block
        self._file.finish_writes()

    def rates(
        self, name: str, requested: Sequence[Request], effort: Effort, progress: Progress
    ) -> tuple[StorageRate, ...]:
        """Measure each request, and return the rates of those that succeeded."""
        rates = []
        for request in requested:
            figure = progress.measure(f"{name}: {request}", partial(self.rate, request, effort))
            if figure is not None:
                rates.append(StorageRate(**dataclasses.asdict(request), bytes_per_second=figure))
        return tuple(rates)

    def rate(self, request: Request, effort: Effort) -> Figure:
        """Measure one request."""
        if request.in_flight > self.nbytes:
            raise ProbeError(
                f"it needs a file of {format_bytes(request.in_flight)}, but space and time only "
                f"allowed for {format_bytes(self.nbytes)}"
            )
        block, depth = request.block, request.depth
        with self._file.mover(self._buffer, block=block, depth=depth) as move:
            run = partial(self.run, move, request)
            return measure_rate(run, effort, unit=request.in_flight, limit=self.nbytes)

    def run(self, move: Mover, request: Request, nbytes: int) -> float:
        """Transfer `nbytes` as whole blocks in random order, and return the seconds it took."""
        blocks = self._random.sample(range(self.nbytes // request.block), nbytes // request.block)
        offsets = [block * request.block for block in blocks]
        if request.operation != "write":
            self._file.drop_page_cache()
        start = self._clock()
        move(request.operation, offsets)
        if request.operation != "read":
            self._file.finish_writes()
        return self._clock() - start


def _random_buffer(nbytes: int) -> memoryview:
    """Return an aligned buffer of random bytes, which cannot be compressed."""
    buffer = mmap.mmap(-1, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    tile = os.urandom(min(MiB, len(buffer)))
    for at in range(0, len(buffer), len(tile)):
        buffer[at : at + len(tile)] = tile[: len(buffer) - at]
    return memoryview(buffer)
