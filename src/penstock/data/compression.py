"""Open files that may be compressed: `.gz`, `.bz2`, `.xz` and `.zst`."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.data.errors import SourceError
from penstock.data.items import import_library
from penstock.units import MiB

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files. The suffix before it says what is in the file."""

ZSTD_READ = 1 << 16
"""Number of compressed bytes that are read at a time. Their content is held in memory."""


def data_suffix(path: Path) -> str:
    """Return the suffix that says what a file contains: `.jsonl` for `chats.jsonl.gz`."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


@contextlib.contextmanager
def open_data(path: Path, offset: int = 0) -> Iterator[BinaryIO]:
    """Open a file for reading from an offset in its uncompressed bytes.

    Compressed files are read from the start and skipped up to the offset.
    """
    try:
        with _open(path) as file:
            if path.suffix.lower() in COMPRESSED:
                _skip(file, offset)
            else:
                file.seek(offset)
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise SourceError(str(path), f"cannot be decompressed: {error}") from None


def _open(path: Path) -> BinaryIO:
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        case ".bz2":
            return cast(BinaryIO, bz2.open(path, "rb"))
        case ".xz":
            return cast(BinaryIO, lzma.open(path, "rb"))
        case ".zst":
            return _open_zstd(path)
    return path.open("rb")


def _open_zstd(path: Path) -> BinaryIO:
    zstandard = import_library("zstandard", "zstandard", str(path))
    # Files of `zstd --long` need a larger window than the library allows by default.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return io.BufferedReader(_Zstd(path, decompressor), MiB)


class _Zstd(io.RawIOBase):
    """Decompresses all frames of a file. Unlike the library's reader, it notices a missing end."""

    def __init__(self, path: Path, decompressor: Any) -> None:
        self._path, self._decompressor = path, decompressor
        self._file = path.open("rb")
        self._frame: Any = None  # the frame that is being decompressed
        self._raw = self._data = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            self._raw = self._raw or self._file.read(ZSTD_READ)
            if not self._raw and self._frame is None:
                return 0
            self._decompress()
        count = min(len(buffer), len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count

    def _decompress(self) -> None:
        if not self._raw:
            raise EOFError("it ends in the middle of a frame")
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            self._data = self._frame.decompress(self._raw)
        except Exception as error:  # ZstdError cannot be named without the library
            raise EOFError(str(error)) from None
        self._raw = self._frame.unused_data
        if self._frame.eof:
            self._frame = None

    def close(self) -> None:
        self._file.close()
        super().close()


def _skip(file: BinaryIO, nbytes: int) -> None:
    while nbytes > 0 and (data := file.read(min(nbytes, MiB))):
        nbytes -= len(data)
