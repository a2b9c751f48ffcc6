"""Read all tensors of a directory, and compare them with their checksums."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from penstock.checkpoint.errors import CheckpointError, NonFiniteTensorError
from penstock.checkpoint.manifest import find_manifest
from penstock.checkpoint.reader import ShardReader
from penstock.units import MiB

THREADS = 4
"""Threads that read: some wait for the disk while others sum the bytes."""

PART_NBYTES = 8 * MiB

Progress = Callable[[int, int, str], None]
"""Called with the bytes read, the total, and the name of a tensor."""

_thread = threading.local()
"""Per thread: a buffer for a part of a tensor."""


def check_weights(folder: Path, stem: str = "model") -> None:
    """Raise an error if the weights of a model are not what was written, or cannot be read.

    Call this before a program reads the files by itself; they stay in the page cache for it.
    Without checksums only the headers are checked, with clearer errors than those of transformers.
    """
    manifest = find_manifest(folder)
    with ShardReader(folder, stem, keep_cached=True) as reader:
        if manifest is not None and manifest.has_checksums:
            for error in find_damage(reader):
                raise error


def find_damage(
    reader: ShardReader, progress: Progress | None = None, *, finite: bool = False
) -> list[CheckpointError]:
    """Read all tensors, and return an error for each that is damaged or cannot be read.

    With `finite`, a tensor with NaN or infinity is an error, too.
    """
    total = sum(_nbytes(reader, name) for name in reader.names)
    counter = _Counter(total, progress)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="penstock check") as threads:
        try:
            check = partial(_check_tensor, reader, counter, finite)
            return [error for error in threads.map(check, reader.names) if error is not None]
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


class _Counter:
    """Adds up what the threads have read."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, threading.Lock()

    def add(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total, name)


def _nbytes(reader: ShardReader, name: str) -> int:
    dtype, shape = reader.spec(name)
    return math.prod(shape) * dtype.itemsize


def _check_tensor(
    reader: ShardReader, counter: _Counter, finite: bool, name: str
) -> CheckpointError | None:
    """Read a tensor in parts. The reader compares the checksum after the last one."""
    dtype, shape = reader.spec(name)
    if not hasattr(_thread, "bytes"):
        _thread.bytes = torch.empty(PART_NBYTES, dtype=torch.uint8)
    buffer = _thread.bytes.view(dtype)
    elements, is_finite = math.prod(shape), True
    try:
        for low in range(0, max(1, elements), len(buffer)):
            part = buffer[: elements - low]
            reader.read_into(name, part, low)
            is_finite = is_finite and not (finite and _has_nonfinite(part))
            counter.add(part.nbytes, name)
    except CheckpointError as error:
        return error
    return None if is_finite else NonFiniteTensorError(reader.file_of(name), name)


def _has_nonfinite(part: torch.Tensor) -> bool:
    if not part.is_floating_point():
        return False
    # Types of one byte have no isfinite of their own.
    wide = part.float() if part.dtype.itemsize == 1 else part
    return not bool(torch.isfinite(wide).all())
