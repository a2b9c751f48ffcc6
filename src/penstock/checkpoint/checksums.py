"""CRC-32C checksums of files and of tensors that are read in ranges.

A tensor is written from start to end, and read by several threads in ranges of any order and size.
Checksums of adjacent ranges can be combined without their bytes, so every byte is summed by the
thread that reads it, while it is in the processor's cache.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from penstock import _native
from penstock.units import MiB

PIECE_NBYTES = 4 * MiB
"""Bytes that are summed before they are copied: few enough to stay in the processor's cache in
between, and enough to wait rarely for Python's lock, which is released while they are summed."""

_FILE_NBYTES = 4 * MiB
_POLYNOMIAL = 0x82F63B78  # reflected, as in csrc/crc32c.cpp
_ONE = 1 << 31  # the polynomial 1
_X8 = 1 << 23  # the polynomial x^8, by which one zero byte multiplies a checksum

ReportBytes = Callable[[int], None]
"""Called with a number of bytes that have been read."""


def crc32c(data: object, before: int = 0) -> int:
    """Return the checksum of a buffer that follows bytes with the checksum `before`."""
    return _native.crc32c(data, before)


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the checksum of two adjacent ranges from the checksums of each."""
    return _multiply(_zeros(second_nbytes), first) ^ second


def checksum_file(path: str | Path, report: ReportBytes | None = None) -> int:
    """Read a file from start to end and return its checksum."""
    with open(path, "rb", buffering=0) as file:
        # Most files of a checkpoint are small, and the pages of a large buffer take longer to
        # allocate than such a file takes to read. A file that grows meanwhile is read to its end.
        nbytes = max(1, min(os.fstat(file.fileno()).st_size, _FILE_NBYTES))
        crc, buffer = 0, memoryview(bytearray(nbytes))
        while count := file.readinto(buffer):
            crc = crc32c(buffer[:count], crc)
            if report is not None:
                report(count)
    return crc


def to_hex(crc: int) -> str:
    """Write a checksum as it is stored and shown."""
    return f"{crc:08x}"


class RangeChecksums:
    """Checksums of the ranges of a tensor that have been read so far.

    Adjacent ranges are merged. One thread at a time may use an instance.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._by_start: dict[int, tuple[int, int]] = {}
        """End and checksum of each range, by its start."""
        self._start_of: dict[int, int] = {}
        """Start of each range, by its end."""

    def add(self, start: int, stop: int, crc: int) -> int | None:
        """Add a range. Return the checksum of the whole tensor once all of it has been added.

        A range that overlaps an earlier one cannot be merged with it; then all are forgotten.
        """
        if any(start < end and begin < stop for begin, (end, _) in self._by_start.items()):
            self._by_start.clear()
            self._start_of.clear()
            return None
        if start in self._start_of:
            before = self._start_of.pop(start)
            crc = combine(self._by_start.pop(before)[1], crc, stop - start)
            start = before
        if stop in self._by_start:
            end, after = self._by_start.pop(stop)
            crc = combine(crc, after, end - stop)
            stop = end
        if (start, stop) == (0, self.nbytes):
            self._start_of.clear()
            return crc
        self._by_start[start] = (stop, crc)
        self._start_of[stop] = start
        return None


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the checksum's polynomial."""
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _zeros(nbytes: int) -> int:
    """Return the polynomial x^(8 nbytes): what so many zero bytes multiply a checksum by."""
    result, power = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            result = _multiply(result, power)
        power = _multiply(power, power)
        nbytes >>= 1
    return result
